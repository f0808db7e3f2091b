"""`podium check`: everything before training, each part with a verdict: ok, note, or problem and what to do.

Loads the model, shows the data as the policy will see it, lets the policy answer two prompts, scores the answers with
the run's rewards, adds up the memory, and runs a short step to estimate how long a step takes. Writes nothing.
"""

import asyncio
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean

from podium.advantage.build import build_advantages
from podium.check.calibrate import StepTiming, loaded_engine, refuse_elsewhere, time_step, without_auto
from podium.data.build import OrderedData, build_run_data, data_lines
from podium.engine.build import cpu_team
from podium.evaluation import held_out_groups
from podium.filter import build_accept
from podium.model.load import Policy, load_policy
from podium.records import Group
from podium.reward.build import build_scoring, check_retirement
from podium.reward.scoring.stage import Scoring, too_many_failed
from podium.reward.scoring.verifiers import final_answer
from podium.rollout.build import make_rollout_for
from podium.run.folder import RunFolder
from podium.run.start import launcher_of
from podium.runtime.wiring.memory import MemoryPlan, memory_plan, num_slots
from podium.runtime.wiring.stages import read_rows
from podium.settings.contracts import is_users
from podium.settings.tables import Settings
from podium.trainer.build import check_trainer

DRY_RUN_PROMPTS = 2
LONG_S = 24 * 3600
OTHERS_SHARE = 0.05
"""The report mentions other programs if they use more than this share of the device's memory."""


@dataclass(frozen=True)
class Part:
    """A section of the report."""

    title: str
    lines: Sequence[str]
    notes: Sequence[str] = ()
    """Facts worth knowing; the run can start."""
    problems: Sequence[str] = ()
    """Reasons why the run would fail, each with what to do."""

    def __str__(self) -> str:
        verdict = "problem" if self.problems else "note" if self.notes else "ok"
        said = [*(f"note: {note}" for note in self.notes), *(f"problem: {problem}" for problem in self.problems)]
        return "\n".join([f"{self.title}: {verdict}", *(f"  {line}" for line in [*self.lines, *said])])


def check(settings: Settings) -> tuple[str, bool]:
    """The report as text, and whether there is no problem. Raises what `podium train` would raise at its start."""
    if settings.run.folder is not None:
        RunFolder(settings.run.folder).refuse_if_used()
    refuse_elsewhere(settings)
    launcher_of(settings)  # raises if the run cannot be launched
    settings = without_auto(settings)
    with cpu_team(settings):
        return _check(settings)


def _check(settings: Settings) -> tuple[str, bool]:
    check_trainer(settings)
    accept = build_accept(settings)
    rows = read_rows(settings)
    policy = load_policy(settings.model, seed=settings.run.seed)
    run_data = build_run_data(settings, *rows, policy)
    data, held_out = run_data.train, run_data.held_out
    scoring = build_scoring(settings, run_data.sources)
    check_retirement(settings, scoring, data)
    memory = memory_plan(settings, policy, max(data.lengths))
    with closing(scoring):
        groups, timing = asyncio.run(_dry_run(settings, policy, data, scoring, memory))
    if accept is not None:
        list(map(accept, groups))  # checks the return values of `accept`; no group is left out here
    parts = [
        Part("settings", _settings_lines(settings), _settings_notes(settings, policy.device.type)),
        Part("data", data_lines(data, policy.tokenizer, "data"), _data_notes(settings, data)),
        *([Part("held-out data", data_lines(held_out, policy.tokenizer, "eval.data"))] if held_out else []),
        _reward_part(settings, groups),
        Part("memory", _memory_lines(settings, memory), (), _memory_problems(settings, policy.device.type, memory)),
        _time_part(settings, data, groups, timing),
    ]
    problems = sum(len(part.problems) for part in parts)
    end = f"{problems} to fix before `podium train`" if problems else "ok: `podium train` would start"
    return "\n\n".join([*map(str, parts), end]), not problems


async def _dry_run(
    settings: Settings, policy: Policy, data: OrderedData, scoring: Scoring, memory: MemoryPlan
) -> tuple[list[Group], StepTiming | None]:
    """Runs a few prompts through the real engine and rewards, then a short step if it fits into memory."""
    rollouts = settings.run.rollouts_per_prompt
    async with loaded_engine(settings, policy, data, memory) as engine:
        patient = replace(scoring.for_evaluation(), max_failed_share=1.0)  # failures are reported, the check goes on
        with closing(make_rollout_for(settings, engine, policy, "check", rollouts)) as rollout:
            groups = await held_out_groups(rollout.start, patient, data.in_order(DRY_RUN_PROMPTS))
        a_step = data.in_order(settings.run.prompts_per_step)
        timing = await time_step(settings, policy, engine, a_step, memory) if memory.fits else None
    return build_advantages(settings)(groups), timing


def _settings_lines(settings: Settings) -> list[str]:
    run, rounds = settings.run, 1 + settings.plan.max_refills
    refilled = f", refilled up to {settings.plan.max_refills} times" if settings.filter.refill else ""
    return [
        f"model {settings.model.name}, " + ("LoRA" if settings.model.lora else "full weights"),
        f"{run.steps} steps of {run.prompts_per_step} prompts × {run.rollouts_per_prompt} rollouts{refilled} = "
        f"{run.steps * run.prompts_per_step * run.rollouts_per_prompt * rounds:,} rollouts at most",
    ]


def _settings_notes(settings: Settings, device: str) -> list[str]:
    own = {"sync": settings.sync.name, "runtime": settings.runtime.name}
    own |= {f"report[{index}]": choice.name for index, choice in enumerate(settings.report)}
    notes = settings.cautions + [
        f"{where}.name = {name!r} is your own; its arguments fit, but what it returns is only seen when training starts"
        for where, name in own.items()
        if is_users(name)
    ]
    trainer = settings.trainer.options
    updates = trainer.get("epochs_per_batch", 1) * trainer.get("minibatches_per_step", 1)
    if updates == 1 and settings.loss.old == "auto" and "clip" in settings.loss.options:
        notes.append("with one update per batch the ratio is 1 and the clip bounds cannot bind")
    warmup = trainer.get("warmup_steps", 0)
    if warmup and warmup >= settings.run.steps:
        notes.append(
            f"trainer.warmup_steps = {warmup} and run.steps = {settings.run.steps}: the whole run is warm-up, below "
            "the full trainer.lr until its last step at least; lower trainer.warmup_steps"
        )
    if device == "cuda" and _is_all_float32(settings, device):
        notes.append(
            "matrix products are in float32, without TF32: on a GPU that is several times slower than bfloat16 and "
            f"takes more memory; {_use_bfloat16(settings)}"
        )
    return notes


def _is_all_float32(settings: Settings, device: str) -> bool:
    is_float32 = settings.model.dtype == "float32" or settings.model.lora is False
    is_float32 |= settings.model.dtype == "auto" and device == "cpu"
    return is_float32 and settings.trainer.options.get("precision") != "bfloat16"


def _use_bfloat16(settings: Settings) -> str:
    """The settings with which this run uses bfloat16."""
    if settings.model.lora is False:
        return "set trainer.precision = 'bfloat16'"
    return "set model.dtype = 'bfloat16', which halves the weights too, or trainer.precision = 'bfloat16'"


def _data_notes(settings: Settings, data: OrderedData) -> list[str]:
    notes = []
    a_step, a_pass = settings.run.prompts_per_step, sum(map(data.num_drawn, data.pools))
    if a_step > a_pass:
        notes.append(f"a step draws {a_step} prompts and a pass has {a_pass}: the same prompt occurs twice in a step")
    dropped = data.num_rows - sum(data.is_kept)
    if dropped * 2 > data.num_rows:
        notes.append(
            f"{dropped} of {data.num_rows} rows are not used, as the table says; raise max_prompt_tokens or lower "
            "rollout.max_new_tokens if they should be"
        )
    return notes


def _reward_part(settings: Settings, groups: Sequence[Group]) -> Part:
    lines = [line for group in groups for line in _group_lines(group)]
    problem = too_many_failed(groups, settings.scoring.max_failed_share)
    return Part("reward dry-run", lines, _reward_notes(groups), [problem] if problem else ())


def _reward_notes(groups: Sequence[Group]) -> list[str]:
    notes = []
    if not any(group.has_signal for group in groups):
        notes.append(
            "no group has signal: all rewards of a group are equal; if most prompts are like that, little is learned: "
            "use prompts that the model solves sometimes, more rollouts_per_prompt, or a reward with partial credit"
        )
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if all(rollout.finish_reason == "length" for rollout in rollouts):
        notes.append("every answer was cut at rollout.max_new_tokens; raise it, or ask for shorter answers")
    unfinished = sum(final_answer(group.prompt, rollout) is None for group in groups for rollout in group.rollouts)
    if unfinished:
        notes.append(
            f"{unfinished} of {len(rollouts)} answers end inside their thinking, so they have no answer to score; "
            'raise rollout.max_new_tokens, or set thinking = "count" on the reward'
        )
    if any(group.reward_failures for group in groups):
        notes.append("a reward failed on some answers, see above; such answers are not trained on")
    return notes


def _group_lines(group: Group) -> list[str]:
    lines = [f"{group.prompt.question!r}, expected {group.prompt.answer!r}"]
    for rollout, reward, advantage in zip(group.rollouts, group.rewards, group.advantages, strict=True):
        lines.append(
            f"  reward {reward if reward is None else round(reward, 4)}  advantage {advantage:+.2f}  {rollout.text!r}"
        )
    lines += [f"  failed: {reason} (×{count})" for reason, count in group.reward_failures.items()]
    if not group.has_signal:
        lines.append("  no signal: all rewards are equal, the group would be dropped")
    return lines


def _memory_lines(settings: Settings, plan: MemoryPlan) -> list[str]:
    checkpointing = ", with gradient checkpointing" if plan.gradient_checkpointing else ""
    has_others = plan.device - plan.available > OTHERS_SHARE * plan.device
    others = f"{_size(plan.available)}, which is what other programs leave of " if has_others else ""
    return [
        f"weights {_size(plan.weights)}, of which trained {_size(plan.trained)}",
        f"gradients {_size(plan.trained)}, optimizer {_size(plan.optimizer)}",
        f"the engine's own copy of weights {_size(plan.engine_copy)}, the reference's {_size(plan.reference)}",
        f"key-value cache {_size(plan.cache)} for up to {num_slots(settings)} rollouts at a time, "
        f"{plan.longest_document} tokens at most, including prompts",
        f"a batch of {plan.largest_batch:,} tokens {_size(plan.per_token * plan.largest_batch)} "
        f"({_size(plan.per_token)} per token{checkpointing}), logits {_size(plan.logits)}",
        f"in total {_size(plan.total)} of {others}{_size(plan.device)}",
    ]


def _memory_problems(settings: Settings, device: str, plan: MemoryPlan) -> list[str]:
    if plan.fits:
        return []
    half = f"{_use_bfloat16(settings)}, " if _is_all_float32(settings, device) else ""
    remedies = (
        "lower engine.concurrency or rollout.max_new_tokens, set trainer.gradient_checkpointing, "
        f"{half}or take a smaller model"
    )
    if plan.total <= plan.device:
        return [f"too much for what other programs leave: end some of them, {remedies}"]
    return [f"too much: {remedies}"]


def _time_part(settings: Settings, data: OrderedData, groups: Sequence[Group], timing: StepTiming | None) -> Part:
    if timing is None:
        return Part("time", ["not measured: it would not fit into memory"])
    rollouts = settings.run.prompts_per_step * settings.run.rollouts_per_prompt
    longest = settings.rollout.options.get("max_new_tokens", timing.tokens)
    now = fmean(rollout.num_written for group in groups for rollout in group.rollouts)
    sampling = [timing.sampling_s(rollouts, length) for length in (now, longest)]
    training = [timing.training_s(rollouts, length) for length in (now, longest)]
    low, high = (sum(pair) for pair in zip(sampling, training, strict=True))
    steps = data.num_steps
    lines = [
        f"a step takes about {_seconds(low)} to {_seconds(high)}: sampling {_seconds(sampling[0])} to "
        f"{_seconds(sampling[1])}, training {_seconds(training[0])} to {_seconds(training[1])}",
        f"{steps} steps take {_seconds(steps * low)} to {_seconds(steps * high)}; evaluations, checkpoints, refills "
        "and rewards slower than sampling add to this, groups without signal take less",
        f"measured here: {timing.rollouts} rollouts of {timing.tokens} tokens were sampled in "
        f"{_seconds(timing.sample_s)} and trained in {_seconds(timing.train_s)}; the lower figures are for answers as "
        f"long as in the dry-run ({now:.0f} tokens), the upper for rollout.max_new_tokens = {longest}",
    ]
    notes = ["all steps take more than a day; lower run.steps, or see the speed section of the README"]
    return Part("time", lines, notes if steps * low > LONG_S else ())


def _seconds(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
