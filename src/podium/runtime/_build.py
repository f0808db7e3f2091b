"""From settings to the parts that every runtime needs: data, rewards, engine, reports, the card of the run."""

import inspect
import math
import os
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
from podium.lookup import choices, find
from podium.loss._correction import Correction
from podium.loss._objective import Objective
from podium.model.load import Policy, choose_device
from podium.pack import pack
from podium.records import Plan, ReferenceSettings, Row
from podium.report._fanout import Reports
from podium.reward._classes import bound_reward
from podium.reward._combine import NamedReward
from podium.reward._contract import declared_range
from podium.reward._scoring import Scoring
from podium.reward._workers import RewardWorkers
from podium.runtime._engine import max_engine_tokens
from podium.runtime._memory import MemoryPlan
from podium.runtime._reference import ReferenceProcess, check_reference
from podium.runtime._watch import Watch
from podium.sections import CorrectionSection, DataSource, Reward, SeparateReference
from podium.settings import Settings
from podium.stages import Engine, Stages
from podium.trainer._optimizer import check_optimizer

SHOWN = 20
"""Unusable answers that the message lists."""

DEFAULT_WORKER_MEMORY_MB = 4096


@dataclass(frozen=True)
class Wired:
    """What a runtime gives back: a run that is ready to start."""

    stages: Stages
    engine: Engine
    plan: Plan
    reports: Reports
    ledger: Ledger
    watch: Watch
    reference: ReferenceProcess | None = None
    """Where it is a process of its own."""


def check_trainer(settings: Settings) -> None:
    """What the trainer needs of this machine, asked before the model is loaded."""
    check_reference(settings)
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
    max_new_tokens = settings.rollout.options.get("max_new_tokens", 0)
    context = min(policy.max_context_tokens, max_engine_tokens(settings))
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


def build_scoring(settings: Settings, data: Sequence[OrderedData], *, all_rows: bool = True) -> Scoring:
    """The settings' rewards, and those that rows name; an unknown name is an error now, not at the first rollout.

    `all_rows`: `data` is all that the run has, so a reward that scores none of it has no effect and is an error.
    """
    by_name: dict[str, NamedReward] = {}
    for choice in settings.reward:
        if choice.name in by_name:
            raise InputError(f"reward: {choice.name!r} is given twice; give each reward one table")
        by_name[choice.name] = _named_reward(choice)
    default = [choice.name for choice in settings.reward if choice.format is None]
    remap = settings.scoring.remap
    for name in remap.values():
        _add_named(by_name, name, f"scoring.remap: reward {name!r}")
    combinations = {names for source in data for names in source.reward_choices}
    named_by_rows = {name for names in combinations for name in names}
    for name in sorted(named_by_rows - set(remap)):
        _add_named(by_name, name, f"{_first_row(data, name)}: reward {name!r}")
    if all_rows:
        _refuse_unused(settings, combinations, default)
    limits = (settings.run.prompts_per_step, settings.scoring.max_failed_share, settings.scoring.non_stop_penalty)
    workers = _build_workers(settings, by_name, all_rows)
    scoring = Scoring(by_name, default, *limits, workers, settings.scoring.scale, remap)
    for names in combinations:
        if all(reward.format is not None for reward in scoring.rewards_of(names)):
            raise InputError(_without_task(data, names, by_name))
    check_answers(scoring, data)
    return scoring


def _add_named(by_name: dict[str, NamedReward], name: str, where: str) -> None:
    """A reward without a table of its own, with its defaults."""
    if name not in by_name:
        if name not in choices("reward") and ":" not in name:
            raise InputError(f"{where} is not known; known: {', '.join(choices('reward'))}, or a 'module:object'")
        by_name[name] = _named_reward(Reward(name=name).resolved("reward", where))


def _refuse_unused(settings: Settings, combinations: set[tuple[str, ...]], default: Sequence[str]) -> None:
    """Tables and names that score no row."""
    named_by_rows = {name for names in combinations for name in names}
    for name in settings.scoring.remap:
        if name not in named_by_rows:
            raise InputError(f"scoring.remap.{name} has no effect: no row names the reward {name!r}; remove it")
    used = {settings.scoring.remap.get(name, name) for name in named_by_rows}
    unused = [] if () in combinations else sorted(set(default) - used)
    if unused:
        raise InputError(f"reward {unused[0]!r} has no effect: every row names its own reward; remove one or the other")


def _without_task(data: Sequence[OrderedData], names: Sequence[str], by_name: dict[str, NamedReward]) -> str:
    """What to say of rows that have format rewards only, or none."""
    if names:
        where = f"{_first_row(data, names[0])} names format rewards only"
        return f"{where}, {', '.join(names)}; name a reward for its answer too"
    if by_name and all(reward.format is not None for reward in by_name.values()):
        return f"no reward but for the format, {next(iter(by_name))!r}; add a [[reward]] table without 'format'"
    return "no reward: add a [[reward]] table, or name one in each row"


def _first_row(data: Sequence[OrderedData], name: str) -> str:
    """The first row that names the reward, for people."""
    rows = ((where, row) for source in data for where, row in zip(source.row_names, source.rows, strict=True))
    return next(where for where, row in rows if name in row.reward)


def check_retirement(settings: Settings, scoring: Scoring, data: OrderedData) -> None:
    """Rows can only be retired where it is known which rollouts are correct."""
    rate = settings.filter.retire_pass_rate
    unknown = sorted({name for names in data.reward_choices for name in scoring.without_highest(names)})
    if rate is not None and unknown:
        raise InputError(
            f"filter.retire_pass_rate = {rate}: reward {unknown[0]!r} does not declare its highest value, so no "
            "rollout is known to be correct; put podium.declare_range(lowest, highest) on it, or remove the setting"
        )


def check_answers(scoring: Scoring, data: Sequence[OrderedData]) -> None:
    """Lets each reward look at the answers of its rows; names every row that it cannot use."""
    complaints = []
    for source in data:
        for where, row in zip(source.row_names, source.rows, strict=True):
            for reward in scoring.rewards_of(row.reward):
                try:
                    getattr(reward.function, "check_answer", _any_answer)(row)
                except (ValueError, TypeError) as error:
                    complaints.append(f"  {where}, reward {reward.name!r}: {error}")
    if complaints:
        more = f"\n  and {len(complaints) - SHOWN} more" if len(complaints) > SHOWN else ""
        listing = "\n".join(complaints[:SHOWN])
        raise InputError(f"{len(complaints)} answers cannot be used; mend or remove the rows:\n{listing}{more}")


def _any_answer(row: Row) -> None:
    """For rewards that say nothing of the answers that they need."""


def check_rewards(settings: Settings) -> None:
    """Rewards that could not run here are an error before the model is loaded."""
    for choice in settings.reward:
        _named_reward(choice)


def _named_reward(choice: Reward) -> NamedReward:
    found = find("reward", choice.name)
    if choice.timeout_s is not None and choice.name.startswith("__main__:"):
        raise InputError(
            f"reward.name = {choice.name!r}: a worker process cannot import the script that was started; put the "
            f"reward into a file of its own and name it 'file.py:{choice.name.removeprefix('__main__:')}'"
        )
    if inspect.isclass(found) and not hasattr(found, "registered_name"):
        raise InputError(f'reward.name = {choice.name!r} is a class; put @podium.register_reward("name") on it')
    if refuse := getattr(found, "refuse", None):
        refuse(choice.timeout_s, **choice.options)
    function = bound_reward(found, choice.options)
    if choice.format == "gate" and math.isinf(declared_range(function)[1]):
        raise InputError(
            f"reward {choice.name!r} with format = 'gate': it does not declare its highest value, so when it lets the "
            "others through is not known; put podium.declare_range(lowest, highest) on it"
        )
    plain = {key: value for key, value in choice.model_dump(mode="json").items() if key in choice.options}
    weight = 1.0 if choice.weight is None else choice.weight
    return NamedReward(choice.name, function, weight, choice.timeout_s, plain, choice.format)


def _build_workers(settings: Settings, by_name: dict[str, NamedReward], all_rows: bool) -> RewardWorkers | None:
    given = settings.scoring
    recipes = [{"name": each.name, "options": each.options} for each in by_name.values() if each.timeout_s is not None]
    memory_mb = given.worker_memory_mb or DEFAULT_WORKER_MEMORY_MB
    for recipe in recipes:
        if (wanted := recipe["options"].get("memory_mb", 0)) > memory_mb and recipe["name"] in choices("reward"):
            raise InputError(
                f"reward {recipe['name']!r}: memory_mb = {wanted} has no effect, its process may take {memory_mb}; "
                "raise scoring.worker_memory_mb"
            )
    if recipes:
        return RewardWorkers(recipes, given.workers or len(os.sched_getaffinity(0)), memory_mb)
    for key in ("workers", "worker_memory_mb"):
        if getattr(given, key) is not None and all_rows:
            raise InputError(f"scoring.{key} has no effect: no reward of this run needs a worker process; remove it")
    return None


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
    """Of the reference that the trainer keeps; one in another process is no business of its."""
    given = settings.model.reference
    if given is None or isinstance(given, SeparateReference):
        return None
    return ReferenceSettings() if given == "initial" else ReferenceSettings(given.alpha, given.every)


def build_filter(settings: Settings) -> Any:
    """`accept` is looked up like any other name of user code."""
    given = settings.filter
    accept = None if given.accept is None else find("filter", given.accept)
    return partial(filter_groups, drop_no_signal=given.drop_no_signal, truncated=given.truncated, accept=accept)


def build_pack(settings: Settings, memory: MemoryPlan, ranks: int = 1) -> Any:
    """Groups in, batches out, as many for each rank."""
    return partial(
        pack,
        max_tokens_per_batch=memory.max_tokens_per_batch,
        temperature=settings.rollout.options.get("temperature", 1.0),
        minibatches=settings.trainer.options.get("minibatches_per_step", 1),
        shared_prefix=settings.pack.shared_prefix,
        ranks=ranks,
    )


def make_trainer(settings: Settings, policy: Policy, plan: Plan, memory: MemoryPlan) -> Any:
    options = settings.trainer.options | {"gradient_checkpointing": memory.gradient_checkpointing}
    wiring = (policy, build_objective(settings), plan.steps, build_reference(settings), settings.pack.shared_prefix)
    return find("trainer", settings.trainer.name)(*wiring, **options)


def eval_options(settings: Settings) -> dict[str, Any]:
    """The rollout's options with `[eval]`'s sampling."""
    own = {"temperature": settings.eval.temperature, "top_k": settings.eval.top_k, "top_p": settings.eval.top_p}
    return settings.rollout.options | own
