"""The runtime that keeps everything in one process: the stages are the objects themselves.

With `ranks` there are several such processes (runtime/ranks). Rank 0 runs the loop; each of the others runs
`serve_rank`, which builds the same trainer, and the same engine where every rank generates.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from podium.data.build import build_run_data, read_sources
from podium.engine.build import fitted, make_engine
from podium.reward.build import build_scoring, check_retirement
from podium.rollout.build import make_rollout_for
from podium.run.build import check_space
from podium.run.folder import RunFolder
from podium.runtime.ranks import Line, RankedEngine, follow, join
from podium.runtime.ranks.launch import check_ranks
from podium.runtime.wiring.stages import Placed, read_rows
from podium.runtime.wiring.trainer import HostedTrainer, start_reference, train_step
from podium.settings.tables import Settings
from podium.sync.build import build_delivery, build_sync
from podium.trainer.build import check_trainer


def local(
    settings: Settings,
    folder: RunFolder,
    step: int | None,
    *,
    ranks: Annotated[int, Field(ge=1, description="processes that train together, one a GPU, under torchrun")] = 1,
) -> Placed:
    """Loads the model and makes the stages, writing nothing; `step` names the checkpoint to continue from."""
    check_ranks(settings, ranks)
    check_trainer(settings)
    rows = read_rows(settings)
    host = HostedTrainer(settings)
    policy = host.policy
    data = build_run_data(settings, *rows, policy)
    scoring = build_scoring(settings, data.sources)
    check_retirement(settings, scoring, data.train)
    line = join() if ranks > 1 else None
    host.build(data.plan.steps, max(data.train.lengths), line)
    check_space(settings, folder, host.memory, step)
    engine = _engine(fitted(settings, data.longest_prompt), host, line, folder.event)
    reference = start_reference(settings)
    delivery = build_delivery(settings, host.trainer, engine, policy, data.train.in_order, folder.path, folder.run_id)
    sleeper = engine if settings.engine.options.get("sleep") else None
    return Placed(
        data=data,
        tokenizer=policy.tokenizer,
        scoring=scoring,
        rollout=partial(make_rollout_for, settings, engine, policy),
        engine=engine,
        trainer=host.trainer,
        train=partial(train_step, host.trainer, reference, sleeper),
        sync=build_sync(settings, delivery),
        memory=host.memory,
        base_digest=host.base_digest,
        begin=host.load_start,
        end=(lambda: None) if reference is None else reference.close,
    )


def serve_rank(settings: Settings, line: Line) -> None:
    """What a rank other than 0 does, from start to end."""
    host = HostedTrainer(settings)
    data = build_run_data(settings, read_sources(settings.data), (), host.policy)
    host.build(data.plan.steps, max(data.train.lengths), line)
    engine = _engine(settings, host, line)
    try:
        follow(line, host.trainer, engine)
    finally:
        if engine is not None:
            engine.close()


def _engine(
    settings: Settings, host: HostedTrainer, line: Line | None, on_event: Callable[..., None] | None = None
) -> Any:
    """This process's engine. Of several ranks, rank 0 has an engine that stands for all, and the others have one only
    where every rank generates: with whole weights on each rank, sampled in the trainer's own process."""
    is_sharded = line is not None and host.own.is_sharded
    shares_weights = settings.engine_traits.shares_weights and settings.sync.name == "shared"
    every_rank_samples = line is not None and not is_sharded and shares_weights
    if line is not None and line.rank and not every_rank_samples:
        return None
    engine = make_engine(
        settings,
        host.policy,
        snapshot=settings.plan.needs_snapshot or is_sharded,
        on_event=on_event,
        cache_bytes=host.memory.cache_limit,
    )
    if line is not None and not line.rank and every_rank_samples:
        return RankedEngine(engine, host.own, line)
    return engine
