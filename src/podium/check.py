"""`podium check`: everything short of training, each part with a plain verdict.

Loads the model, shows the data as the policy will see it, lets the policy answer two prompts, scores the answers with
the run's rewards, and adds up the memory. Writes nothing.
"""

import asyncio
from contextlib import closing
from uuid import uuid4

from podium.data._order import OrderedData
from podium.data._table import data_lines
from podium.evaluation import held_out_groups
from podium.model.load import Policy, load_policy
from podium.records import Group
from podium.reward._scoring import Scoring
from podium.run_folder import RunFolder
from podium.runtime._build import (
    build_advantages,
    build_data,
    build_filter,
    build_scoring,
    check_retirement,
    check_rewards,
    check_trainer,
    read_sources,
)
from podium.runtime._engine import hand_over, make_engine, make_rollout
from podium.runtime._keep import check_start
from podium.runtime._memory import memory_plan, num_slots
from podium.runtime._reports import check_reports
from podium.settings import Settings

DRY_RUN_PROMPTS = 2


def check(settings: Settings) -> str:
    """The report as text; what is wrong is raised as an `InputError`, as `podium train` would."""
    if settings.run.folder is not None:
        RunFolder(settings.run.folder).refuse_if_used()
    check_rewards(settings)
    check_trainer(settings)
    check_start(settings)
    check_reports(settings)
    build_filter(settings)
    rows, held_out_rows = read_sources(settings.data), read_sources(settings.eval.data)
    policy = load_policy(settings.model, seed=settings.run.seed)
    data = build_data(settings, rows, policy, settings.plan)
    held_out = build_data(settings, held_out_rows, policy, settings.plan) if held_out_rows else None
    scoring = build_scoring(settings, [data, *([held_out] if held_out else [])])
    check_retirement(settings, scoring, data)
    with closing(scoring):
        groups = asyncio.run(_dry_run(settings, policy, data, scoring))
    parts = [
        _section("settings", _settings_lines(settings)),
        _section("data", data_lines(data, policy.tokenizer, "data") + _data_notes(settings, data)),
        *([_section("held-out data", data_lines(held_out, policy.tokenizer, "eval.data"))] if held_out else []),
        _section("reward dry-run", [line for group in groups for line in _group_lines(group)]),
        _section("memory", _memory_lines(settings, policy, data)),
    ]
    return "\n\n".join(parts) + "\n\nok: `podium train` would start"


async def _dry_run(settings: Settings, policy: Policy, data: OrderedData, scoring: Scoring) -> list[Group]:
    """A few prompts through the real engine and rewards."""
    rollouts = settings.run.rollouts_per_prompt
    with closing(make_engine(settings, policy, snapshot=settings.plan.needs_snapshot)) as engine:
        await hand_over(settings, engine, policy, f"check-{uuid4().hex[:12]}")
        rollout = make_rollout(settings, engine, policy, settings.rollout.options, rollouts, "check")
        groups = await held_out_groups(rollout, scoring.for_evaluation(), data.in_order(DRY_RUN_PROMPTS))
    return build_advantages(settings)(groups)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _settings_lines(settings: Settings) -> list[str]:
    run, rounds = settings.run, 1 + settings.plan.max_refills
    refilled = f", refilled up to {settings.plan.max_refills} times" if settings.filter.refill else ""
    lines = [
        f"model {settings.model.name}, " + ("LoRA" if settings.model.lora else "full weights"),
        f"{run.steps} steps of {run.prompts_per_step} prompts × {run.rollouts_per_prompt} rollouts{refilled} = "
        f"{run.steps * run.prompts_per_step * run.rollouts_per_prompt * rounds:,} rollouts at most",
    ]
    trainer = settings.trainer.options
    updates = trainer.get("epochs_per_batch", 1) * trainer.get("minibatches_per_step", 1)
    if updates == 1 and settings.loss.old == "auto" and {"clip_low", "clip_high"} & set(settings.loss.options):
        lines.append("note: with one update per batch the ratio is 1 and the clip bounds cannot bind")
    return lines


def _data_notes(settings: Settings, data: OrderedData) -> list[str]:
    a_step, a_pass = settings.run.prompts_per_step, sum(map(data.num_drawn, data.pools))
    if a_step <= a_pass:
        return []
    return [f"note: a step draws {a_step} prompts and a pass has {a_pass}: the same prompt comes twice in a step"]


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


def _memory_lines(settings: Settings, policy: Policy, data: OrderedData) -> list[str]:
    plan = memory_plan(settings, policy, max(data.lengths))
    batch = plan.per_token * plan.max_tokens_per_batch
    lines = [
        f"weights {_size(plan.weights)}, of which trained {_size(plan.trained)}",
        f"gradients {_size(plan.trained)}, optimizer {_size(plan.optimizer)}",
        f"the engine's own copy of weights {_size(plan.engine_copy)}, the reference's {_size(plan.reference)}",
        f"key-value cache {_size(plan.cache)} for {num_slots(settings)} rollouts of {plan.longest_document} tokens, "
        "prompts too",
        f"a batch of {plan.max_tokens_per_batch:,} tokens {_size(batch)} "
        f"({_size(plan.per_token)} a token{', with gradient checkpointing' if plan.gradient_checkpointing else ''}), "
        f"logits {_size(plan.logits)}",
        f"together {_size(plan.total)} of {_size(plan.device)}",
    ]
    if plan.total > plan.device:
        lines.append(
            "too much: lower engine.concurrency or rollout.max_new_tokens, set trainer.gradient_checkpointing, or take "
            "a smaller model"
        )
    return lines


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
