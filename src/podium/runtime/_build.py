"""From settings to the parts that every runtime needs: data, rewards, engine, reports, the card of the run."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from podium.advantage._assign import assign_advantages
from podium.data._mixture import Source
from podium.data._order import OrderedData
from podium.errors import InputError
from podium.filter import filter_groups
from podium.ledger import Ledger
from podium.lookup import choices, find, validate_options
from podium.loss._correction import Correction
from podium.loss._objective import Objective
from podium.model.load import Policy, choose_device
from podium.pack import pack
from podium.records import Plan, ReferenceSettings, Row
from podium.report._fanout import Reports
from podium.report.jsonl import Jsonl
from podium.reward._scoring import NamedReward, Scoring
from podium.run_folder import RunFolder
from podium.runtime._memory import MemoryPlan
from podium.sections import Choice, CorrectionSection, DataSource
from podium.settings import Settings
from podium.stages import Engine, Stages
from podium.sync._probe import TOLERANCE
from podium.trainer._optimizer import check_optimizer


@dataclass(frozen=True)
class Wired:
    """What a runtime gives back: a run that is ready to start."""

    stages: Stages
    plan: Plan
    reports: Reports
    ledger: Ledger


def check_trainer(settings: Settings) -> None:
    """What the trainer needs of this machine, asked before the model is loaded."""
    check_optimizer(settings.trainer.options.get("optimizer", "adamw"), choose_device(settings.model.device))


@dataclass(frozen=True)
class ReadSource:
    """One table of `[[data]]` and its rows, as they were before the model was there to render them."""

    table: DataSource
    rows: Sequence[Row]
    num_beyond_max_rows: int


def read_sources(tables: Sequence[DataSource]) -> list[ReadSource]:
    """Reads every source. It needs no model, so bad data is told before one is loaded."""
    read = []
    for table in tables:
        rows = find("data", table.name)(**table.options)
        some = rows[: table.max_rows]
        named = [Row(row.messages, row.answer, row.reward, row.source or table.name, row.metadata) for row in some]
        read.append(ReadSource(table, named, len(rows) - len(some)))
    return read


def build_data(settings: Settings, read: Sequence[ReadSource], policy: Policy, plan: Plan) -> OrderedData:
    """The rows of all sources, rendered, in the run's order."""
    max_new_tokens, context = settings.rollout.options.get("max_new_tokens", 0), policy.max_context_tokens
    fits = context - max_new_tokens
    if fits < 1:
        raise InputError(
            f"rollout.max_new_tokens = {max_new_tokens} leaves no room for a prompt in a context of {context}"
        )
    sources = [
        Source(
            name=each.table.name,
            num_rows=len(each.rows),
            max_prompt_tokens=min(fits, each.table.max_prompt_tokens or fits),
            num_beyond_max_rows=each.num_beyond_max_rows,
            weight=each.table.weight,
            rows=each.table.rows,
        )
        for each in read
    ]
    rows = [row for each in read for row in each.rows]
    system = settings.rollout.options.get("system")
    return OrderedData(rows, sources, policy.tokenizer, plan, settings.run.seed, system)


def probe_ids(data: OrderedData) -> list[int]:
    """Fixed tokens for the parity probe: the first prompts, one after the other."""
    ids = [token for prompt in data.in_order(4) for token in prompt.token_ids]
    return (ids * 2)[: max(2, min(64, len(ids)))]


def parity_tolerance(settings: Settings) -> float:
    """Wider only where the trainer alone computes in bfloat16; otherwise both run the same layers."""
    return TOLERANCE[settings.trainer.options.get("precision", "float32")]


def build_scoring(settings: Settings, data: Sequence[OrderedData], *, all_rows: bool = True) -> Scoring:
    """The settings' rewards, and those that rows name; an unknown name is an error now, not at the first rollout.

    `all_rows`: `data` is all that the run has, so a reward that scores none of it has no effect and is an error.
    """
    by_name: dict[str, NamedReward] = {}
    for choice in settings.reward:
        if choice.name in by_name:
            raise InputError(f"reward: {choice.name!r} is given twice; give each reward one table")
        function = bind_options(find("reward", choice.name), choice.options)
        by_name[choice.name] = NamedReward(choice.name, function, choice.weight)
    combinations = {names for source in data for names in source.reward_choices}
    named_by_rows = {name for names in combinations for name in names}
    for name in sorted(named_by_rows - set(by_name)):
        if name not in choices("reward") and ":" not in name:
            raise InputError(
                f"a row names the reward {name!r}, which is not known; known: {', '.join(choices('reward'))}"
            )
        function = find("reward", name)
        options = validate_options(f"reward {name!r}, named by a row", function, {})
        by_name[name] = NamedReward(name, bind_options(function, options))
    unused = [] if () in combinations else sorted({choice.name for choice in settings.reward} - named_by_rows)
    if unused and all_rows:
        raise InputError(f"reward {unused[0]!r} has no effect: every row names its own reward; remove one or the other")
    if () in combinations and not settings.reward:
        raise InputError("no reward: add a [[reward]] table, or name one in each row")
    default = [choice.name for choice in settings.reward]
    limits = settings.scoring
    return Scoring(by_name, default, settings.run.prompts_per_step, limits.max_failed_share, limits.non_stop_penalty)


def check_retirement(settings: Settings, scoring: Scoring, data: OrderedData) -> None:
    """Rows can only be retired where it is known which rollouts are correct."""
    rate = settings.filter.retire_pass_rate
    unknown = sorted({name for names in data.reward_choices for name in scoring.without_highest(names)})
    if rate is not None and unknown:
        raise InputError(
            f"filter.retire_pass_rate = {rate}: reward {unknown[0]!r} does not declare its highest value, so no "
            "rollout is known to be correct; put podium.declare_range(lowest, highest) on it, or remove the setting"
        )


def bind_options(function: Any, options: dict[str, Any]) -> Any:
    """The reward with its options bound; the declared range stays on it."""
    bound = partial(function, **options)
    for name in ("min_value", "max_value"):
        if hasattr(function, name):
            setattr(bound, name, getattr(function, name))
    return bound


def build_advantages(settings: Settings) -> Any:
    """Groups in, groups with advantages out."""
    function = partial(find("advantage", settings.advantage.name), **settings.advantage.options)
    return partial(assign_advantages, function=function)


def build_objective(settings: Settings) -> Objective:
    """The named loss with the rest of `[loss]` around it."""
    given = settings.loss
    correction = None
    if isinstance(given.correction, CorrectionSection):
        fields = given.correction.model_dump()
        correction = Correction(**{**fields, "sequence_band": fields["sequence_band"] or None})
    shared = {key: getattr(given, key) for key in ("average", "constant", "old", "kl_beta", "kl_estimator", "kl_in")}
    return Objective(
        policy_loss=partial(find("loss", given.name), **given.options),
        correction=correction,
        **{key: value for key, value in shared.items() if value is not None},
    )


def build_reference(settings: Settings) -> ReferenceSettings | None:
    given = settings.model.reference
    if given is None:
        return None
    return ReferenceSettings() if given == "initial" else ReferenceSettings(given.alpha, given.every)


def build_filter(settings: Settings) -> Any:
    """`accept` is looked up like any other name of user code."""
    given = settings.filter
    accept = None if given.accept is None else find("filter", given.accept)
    return partial(filter_groups, drop_no_signal=given.drop_no_signal, truncated=given.truncated, accept=accept)


def build_pack(settings: Settings, memory: MemoryPlan) -> Any:
    """Groups in, batches out."""
    return partial(
        pack,
        max_tokens_per_batch=memory.max_tokens_per_batch,
        temperature=settings.rollout.options.get("temperature", 1.0),
        minibatches=settings.trainer.options.get("minibatches_per_step", 1),
        shared_prefix=settings.pack.shared_prefix,
    )


def make_trainer(settings: Settings, policy: Policy, plan: Plan, memory: MemoryPlan) -> Any:
    options = settings.trainer.options | {"gradient_checkpointing": memory.gradient_checkpointing}
    wiring = (policy, build_objective(settings), plan.steps, build_reference(settings), settings.pack.shared_prefix)
    return find("trainer", settings.trainer.name)(*wiring, **options)


def make_engine(settings: Settings, policy: Policy, *, snapshot: bool) -> Any:
    """`snapshot`: the engine keeps its weights while the trainer moves on."""
    return find("engine", settings.engine.name)(policy, snapshot, **settings.engine.options)


def make_rollout(
    settings: Settings, engine: Engine, policy: Policy, options: dict[str, Any], rollouts_per_prompt: int, purpose: str
) -> Any:
    """`purpose` keeps the seeds of training, evaluation and checks apart."""
    make, seed = find("rollout", settings.rollout.name), settings.run.seed
    wiring = (engine, policy.tokenizer, policy.stop_ids, policy.vocabulary, rollouts_per_prompt, seed, purpose)
    return make(*wiring, **options)


def eval_options(settings: Settings) -> dict[str, Any]:
    """The rollout's options with `[eval]`'s sampling."""
    own = {"temperature": settings.eval.temperature, "top_k": settings.eval.top_k, "top_p": settings.eval.top_p}
    return settings.rollout.options | own


def build_reports(settings: Settings, folder: RunFolder, ledger: Ledger, console_mode: str | None) -> list[Any]:
    """`jsonl` always, then the settings'; `console_mode` is for this process only and is not saved with the run.

    A report whose first argument is called `folder` is handed the run folder.
    """
    given = list(settings.report)
    if any(choice.name == "jsonl" for choice in given):
        raise InputError("report 'jsonl' has no effect: it is always written; remove its table")
    if console_mode is not None:
        console = Choice.model_validate({"name": "console", "mode": console_mode})
        given = [console, *(choice for choice in given if choice.name != "console")]
    made: list[Any] = [Jsonl(ledger)]
    for choice in given:
        make = find("report", choice.name)
        wants_folder = "folder" in inspect.signature(make).parameters
        made.append(make(*([folder] if wants_folder else []), **choice.options))
    return made


def run_card(settings: Settings, folder: RunFolder, plan: Plan) -> dict[str, Any]:
    """What reports say of a run as a whole."""
    lora = settings.model.lora
    trainer = settings.trainer.options
    facts = {
        "model": settings.model.name,
        "weights": f"LoRA r {lora.r}" if lora else "full",
        "loss": settings.loss.name,
        "prompts/step": plan.prompts_per_step,
        "rollouts/prompt": plan.rollouts_per_prompt,
        "lr": trainer.get("lr"),
        "seed": settings.run.seed,
    }
    title = f"{settings.run.name}: {settings.loss.name} on {settings.model.name}"
    return {"title": title, "folder": str(folder.path), "steps": plan.steps, "facts": facts}
