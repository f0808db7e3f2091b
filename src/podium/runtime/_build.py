"""From settings to the parts that every runtime needs: data, rewards, engine, reports, the card of the run."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from podium.advantage._assign import assign_advantages, check_advantages
from podium.contracts import check_call, checked, is_users, user_code
from podium.data._mixture import Source
from podium.data._order import OrderedData
from podium.errors import InputError
from podium.filter import filter_groups
from podium.ledger import Ledger
from podium.lookup import choices, find, option_fields
from podium.loss._correction import Correction
from podium.loss._objective import Objective
from podium.model.load import Policy, choose_device
from podium.pack import pack
from podium.records import Group, Plan, ReferenceSettings, Row
from podium.report._fanout import Reports
from podium.reward._combine import NamedReward
from podium.reward._scoring import Scoring
from podium.runtime._engine import max_engine_tokens
from podium.runtime._memory import MemoryPlan
from podium.runtime._reference import check_reference
from podium.runtime._rewards import ScoringRecipe, named_reward
from podium.runtime._users import UsersLoss
from podium.runtime._watch import Watch
from podium.sections import CorrectionSection, DataSource, Eval, Reward, SeparateReference
from podium.settings import Settings
from podium.stages import Engine, Stages
from podium.trainer._optimizer import check_optimizer

SHOWN = 20
"""Unusable answers that the message lists."""


@dataclass(frozen=True)
class Wired:
    """What a runtime gives back: a run that is ready to start."""

    stages: Stages
    engine: Engine
    plan: Plan
    reports: Reports
    ledger: Ledger
    watch: Watch
    end: Callable[[], None] = lambda: None
    """Ends what the runtime itself started; called last."""

    def close(self) -> None:
        """Everything that was started, one after the other; what fails to close keeps nothing else open."""
        with ExitStack() as last_first:
            for close in (
                self.end,
                self.stages.sync.close,
                self.engine.close,
                self.stages.reward.close,
                self.watch.end,
            ):
                last_first.callback(close)


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
        with user_code("data.name", table.name):
            rows = find("data", table.name)(**table.options)
        others = [row for row in rows if not isinstance(row, Row)] if isinstance(rows, (list, tuple)) else [rows]
        if others:
            raise InputError(
                f"data.name = {table.name!r} returned a {type(others[0]).__name__}; it must return a list of podium.Row"
            )
        some = rows[: table.max_rows]
        named = [Row(row.messages, row.answer, row.reward, row.source or table.name, row.metadata) for row in some]
        read.append(ReadSource(table, named, len(rows) - len(some)))
    return read


def build_data(settings: Settings, read: Sequence[ReadSource], policy: Any, plan: Plan) -> OrderedData:
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
    scoring = scoring_recipe(settings, data, all_rows=all_rows).build()
    check_scoring(scoring, data)
    return scoring


def scoring_recipe(settings: Settings, data: Sequence[OrderedData], *, all_rows: bool = True) -> ScoringRecipe:
    chosen: dict[str, Reward] = {}
    for choice in settings.reward:
        if choice.name in chosen:
            raise InputError(f"reward: {choice.name!r} is given twice; give each reward one table")
        chosen[choice.name] = choice
    default = [choice.name for choice in settings.reward if choice.format is None]
    remap = settings.scoring.remap
    for name in remap.values():
        _add_named(chosen, name, f"scoring.remap: reward {name!r}")
    combinations = {names for source in data for names in source.reward_choices}
    named_by_rows = {name for names in combinations for name in names}
    for name in sorted(named_by_rows - set(remap)):
        _add_named(chosen, name, f"{_first_row(data, name)}: reward {name!r}")
    recipe = ScoringRecipe(tuple(chosen.values()), tuple(default), settings.scoring, settings.run.prompts_per_step)
    if all_rows:
        _refuse_unused(settings, combinations, default)
        _refuse_idle_workers(recipe)
    return recipe


def check_scoring(scoring: Scoring, data: Sequence[OrderedData]) -> None:
    """Every row has a reward for its answer, and one that can use it."""
    for names in {names for source in data for names in source.reward_choices}:
        if all(reward.format is not None for reward in scoring.rewards_of(names)):
            raise InputError(_without_task(data, names, scoring.rewards_of(names)))
    check_answers(scoring, data)


def _add_named(chosen: dict[str, Reward], name: str, where: str) -> None:
    """A reward without a table of its own, with its defaults."""
    if name not in chosen:
        if name not in choices("reward") and ":" not in name:
            raise InputError(f"{where} is not known; known: {', '.join(choices('reward'))}, or a 'module:object'")
        chosen[name] = Reward(name=name).resolved("reward", where)


def _refuse_idle_workers(recipe: ScoringRecipe) -> None:
    for key in ("workers", "worker_memory_mb"):
        if getattr(recipe.section, key) is not None and not recipe.needs_processes():
            raise InputError(f"scoring.{key} has no effect: no reward of this run needs a worker process; remove it")


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


def _without_task(data: Sequence[OrderedData], names: Sequence[str], formats: Sequence[NamedReward]) -> str:
    """What to say of rows that have format rewards only, or none."""
    if names:
        where = f"{_first_row(data, names[0])} names format rewards only"
        return f"{where}, {', '.join(names)}; name a reward for its answer too"
    if formats:
        return f"no reward but for the format, {formats[0].name!r}; add a [[reward]] table without 'format'"
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
        named_reward(choice)


def build_advantages(settings: Settings) -> Any:
    """Groups in, groups with advantages out."""
    name, options = settings.advantage.name, settings.advantage.options
    assigned = partial(_assigned, partial(find("advantage", name), **options), name)
    if is_users(name):  # now: the first group with signal may come much later
        with user_code("advantage.name", name):
            check_advantages(assigned.args[0], [0.0, 1.0, 0.5])
    return assigned


def _assigned(function: Any, name: str, groups: Sequence[Group]) -> list[Group]:
    with user_code("advantage.name", name):
        return assign_advantages(groups, function=function)


def build_objective(settings: Settings) -> Objective:
    """The named loss with the rest of `[loss]` around it."""
    given = settings.loss
    correction = None
    if isinstance(given.correction, CorrectionSection):
        fields = given.correction.model_dump()
        correction = Correction(**{**fields, "sequence_band": fields["sequence_band"] or None})
    shared = {key: getattr(given, key) for key in ("average", "constant", "old", "kl_beta", "kl_estimator", "kl_in")}
    function = partial(find("loss", given.name), **given.options)
    return Objective(
        policy_loss=UsersLoss(function, given.name) if is_users(given.name) else function,
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
    """Groups in, those that are trained out."""
    given = settings.filter
    chosen = {"drop_no_signal": given.drop_no_signal, "truncated": given.truncated}
    return partial(filter_groups, **chosen, accept=build_accept(settings))


def build_accept(settings: Settings) -> Callable[[Group], bool] | None:
    """`filter.accept`, which is looked up like any other name of user code."""
    name = settings.filter.accept
    if name is None:
        return None
    found = find("filter", name, "filter.accept")
    check_call("filter", "filter.accept", name, found, {})
    return partial(_accepted, found, name)


def _accepted(function: Any, name: str, group: Group) -> bool:
    with user_code("filter.accept", name):
        verdict = function(group)
    if not isinstance(verdict, bool | np.bool_):
        if inspect.iscoroutine(verdict):
            verdict.close()  # nothing will wait for it
        raise InputError(f"filter.accept = {name!r} returned {_shown(verdict)}; return True or False")
    return bool(verdict)


def _shown(value: object) -> str:
    """A value that is short, or else what it is."""
    return repr(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


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
    name = settings.trainer.name
    make = find("trainer", name)
    if is_users(name) and "gradient_checkpointing" not in option_fields(make):
        del options["gradient_checkpointing"]
    with user_code("trainer.name", name):
        return checked("trainer", name, make(*wiring, **options))


def eval_options(settings: Settings) -> dict[str, Any]:
    """The rollout's options with `[eval]`'s sampling; a stage of the user's need not have all of that."""
    own = {"temperature": settings.eval.temperature, "top_k": settings.eval.top_k, "top_p": settings.eval.top_p}
    taken = option_fields(find("rollout", settings.rollout.name))
    for key, value in own.items():
        if key not in taken and value != Eval.model_fields[key].default:
            raise InputError(
                f"eval.{key} = {value} has no effect: rollout.name = {settings.rollout.name!r} has no option {key!r}; "
                "remove it, or give the stage that option"
            )
    return settings.rollout.options | {key: value for key, value in own.items() if key in taken}
