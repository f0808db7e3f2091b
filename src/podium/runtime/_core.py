"""What every rank of a run builds alike: the trainer and, where it samples, its engine."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from podium.errors import InputError
from podium.model.load import Policy, load_policy
from podium.records import Plan
from podium.runtime._build import ReadSource, build_data, make_trainer
from podium.runtime._engine import make_engine
from podium.runtime._memory import MemoryPlan, memory_plan
from podium.runtime._ranks import Line, RankedEngine, RankedTrainer, follow
from podium.settings import Settings


def make_core(
    settings: Settings,
    policy: Policy,
    plan: Plan,
    memory: MemoryPlan,
    line: Line | None = None,
    on_event: Callable[..., None] | None = None,
) -> tuple[Any, Any]:
    """(trainer, engine); no engine on a rank that does not sample.

    `line`: this process is one of several ranks, and rank 0's two stand for those of all of them.
    """
    if line is not None:
        line.note_loaded(policy)
    trainer = make_trainer(settings, policy, plan, memory)
    if line is None:
        return trainer, make_engine(settings, policy, snapshot=plan.needs_snapshot, on_event=on_event)
    every_rank_samples = (
        not trainer.is_sharded and settings.engine.name == "inprocess" and settings.sync.name == "shared"
    )
    if line.rank and not every_rank_samples:
        return trainer, None
    engine = make_engine(settings, policy, snapshot=plan.needs_snapshot or trainer.is_sharded, on_event=on_event)
    if line.rank:
        return trainer, engine
    return RankedTrainer(trainer, line), RankedEngine(engine, trainer, line) if every_rank_samples else engine


def serve_rank(settings: Settings, rows: Sequence[ReadSource], line: Line) -> None:
    """What a rank other than 0 does, from start to end."""
    policy = load_policy(settings.model, seed=settings.run.seed)
    data = build_data(settings, rows, policy, settings.plan)
    plan = replace(settings.plan, steps=data.num_steps)
    trainer, engine = make_core(settings, policy, plan, memory_plan(settings, policy, max(data.lengths)), line)
    try:
        follow(line, trainer, engine)
    finally:
        if engine is not None:
            engine.close()


def check_ranks(settings: Settings, ranks: int) -> None:
    """Settings that several ranks, or one, cannot have."""
    trainer = settings.trainer.name
    if ranks == 1 and trainer in ("fsdp", "deepspeed"):
        raise InputError(f"trainer.name = {trainer!r} is for several ranks; set runtime.ranks, or use 'single'")
    if ranks > 1 and settings.run.max_lag and settings.engine.name == "inprocess":
        raise InputError(
            "run.max_lag with runtime.ranks needs an engine in another process: ranks train and sample in turn; set "
            "engine.name = 'pool' or 'vllm_server'"
        )
    if ranks == 1 or trainer == "single":
        return
    if settings.pack.shared_prefix:
        raise InputError(f"pack.shared_prefix does not go with trainer.name = {trainer!r}; use 'single' or remove it")
    if settings.trainer.options.get("optimizer", "adamw") != "adamw":
        raise InputError(f"trainer.optimizer must be 'adamw' with trainer.name = {trainer!r}")
