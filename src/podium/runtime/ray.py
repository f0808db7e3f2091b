"""The runtime that spreads a run over Ray: rollout workers, reward workers and the trainer are actors; the loop and all
that is written stay in the driver's process.

    driver: loop ──► RolloutWorkers ──► rollout actors, each an engine        groups and weights go
              │  ──► RewardActors ────► reward actors                         through the object store
              └────► RemoteTrainer ───► trainer actor (one a rank) ──► weights ──► rollout actors
                     (RemoteReference ► reference actor, where model.reference is apart)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from podium.errors import InputError
from podium.model.load import load_reader
from podium.run_folder import RunFolder
from podium.runtime._build import (
    ReadSource,
    Wired,
    build_data,
    check_retirement,
    check_rewards,
    check_scoring,
    read_sources,
    scoring_recipe,
)
from podium.runtime._core import check_ranks
from podium.runtime._engine import make_delivery
from podium.runtime._keep import check_space, check_start
from podium.runtime._ray.environment import prepare_import
from podium.runtime._ray.limits import Limits
from podium.runtime._reports import check_reports
from podium.runtime._stages import Parts, wire
from podium.sections import SeparateReference
from podium.settings import Settings

if TYPE_CHECKING:
    from podium.runtime._ray.staff import Staff

ENGINES = ("inprocess", "vllm_local")
TOGETHER = (
    "prompts that a worker gets together; by default its share of a step where the engine is inprocess, which writes "
    "them in one batch (4 with run.max_lag), and 1 with vLLM"
)
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


def ray(
    settings: Settings,
    folder: RunFolder,
    stop_requested: Callable[[], bool],
    step: int | None = None,
    console_mode: str | None = None,
    *,
    ranks: Annotated[int, Field(ge=1, description="actors that train together, one a GPU")] = 1,
    rollout_workers: Annotated[
        Count | tuple[Count, Count], Field(description="actors that sample, or the fewest and the most of them")
    ] = 1,
    reward_workers: Annotated[int, Field(ge=1, description="actors that score")] = 1,
    gpus_per_rollout_worker: Annotated[
        float | None,
        Field(ge=0, description="may be a share; by default engine.tensor_parallel where Ray has GPUs, else 0"),
    ] = None,
    gpus_per_rank: Annotated[
        float | None, Field(ge=0, description="may be a share; by default 1 where Ray has GPUs, else 0")
    ] = None,
    cpus_per_worker: Annotated[float, Field(gt=0, description="that each actor asks Ray for")] = 1.0,
    prompts_per_request: Annotated[Count | None, Field(description=TOGETHER)] = None,
    address: Annotated[
        str | None, Field(description="of a cluster: auto or host:port; by default a new one on this machine")
    ] = None,
    linger_s: Annotated[
        Seconds | None,
        Field(description="how long workers at an address wait for a driver to come back; by default 300"),
    ] = None,
    start_s: Annotated[Seconds, Field(description="for workers to start and load the model")] = 600.0,
    frozen_s: Annotated[Seconds, Field(description="a worker silent for so long is taken for dead")] = 10.0,
    stalled_s: Annotated[
        Seconds,
        Field(description="and a rollout worker that wrote no token for so long; writing a batch may take that"),
    ] = 60.0,
    recovery_s: Annotated[
        Seconds, Field(description="without any worker of a kind for so long, the run fails")
    ] = 300.0,
    max_restarts: Annotated[int, Field(ge=0, description="starts in a row that may fail in one place")] = 5,
) -> Wired:
    """Starts the workers and wires the stages, writing nothing; `step` names the checkpoint to go on from."""
    replicas = rollout_workers if isinstance(rollout_workers, tuple) else (rollout_workers, rollout_workers)
    _refuse(settings, replicas, ranks, address, linger_s)
    check_rewards(settings)
    check_start(settings)
    check_reports(settings)
    read = read_sources(settings.data), read_sources(settings.eval.data)
    prepare_import(address)
    from podium.runtime._ray.cluster import Cluster
    from podium.runtime._ray.staff import Needs, Staff

    references = int(isinstance(settings.model.reference, SeparateReference))
    gpus = gpus_per_rollout_worker, gpus_per_rank
    needs = Needs(replicas, reward_workers, ranks, references, *gpus, cpus_per_worker, prompts_per_request)
    limits = Limits(start_s, frozen_s, stalled_s, recovery_s, max_restarts)
    staff = Staff(settings, folder, needs, limits, Cluster(address, folder.run_id, needs.num_cpus, linger_s))
    try:
        return wire(settings, folder, _parts(settings, folder, step, staff, *read), stop_requested, step, console_mode)
    except BaseException:
        staff.close()
        raise


ray.channels = ("adapter", "disk")  # type: ignore[attr-defined]
ray.starts_ranks = True  # type: ignore[attr-defined]


def _parts(
    settings: Settings,
    folder: RunFolder,
    step: int | None,
    staff: Staff,
    rows: Sequence[ReadSource],
    held_out_rows: Sequence[ReadSource],
) -> Parts:
    """Starts the actors, and makes of them what the loop needs."""
    from podium.runtime._ray.trainer import StoreDelivery

    reader = load_reader(settings.model)
    data = build_data(settings, rows, reader, settings.plan)
    plan = replace(settings.plan, steps=data.num_steps)
    held_out = build_data(settings, held_out_rows, reader, plan) if held_out_rows else None
    sources = [data, *([held_out] if held_out else [])]
    policy = staff.hire(reader.tokenizer, max(max(source.lengths) for source in sources))
    memory = staff.prepare(plan.steps, max(data.lengths), scoring_recipe(settings, sources))
    trainer, engine, scoring = staff.trainer, staff.engine, staff.rewards.scoring
    check_scoring(scoring, sources)
    check_retirement(settings, scoring, data)
    check_space(settings, folder, memory, step)
    return Parts(
        plan=plan,
        policy=policy,
        data=data,
        held_out=held_out,
        scoring=scoring,
        trainer=trainer,
        engine=engine,
        delivery=make_delivery(settings, trainer, engine, policy, data, folder, StoreDelivery),
        memory=memory,
        ranks=settings.runtime.options["ranks"],
        begin=trainer.load_start,
        base_digest=policy.base_digest,
        end=staff.close,
    )


def _refuse(
    settings: Settings, replicas: tuple[int, int], ranks: int, address: str | None, linger_s: float | None
) -> None:
    """What has no effect, or cannot be right, said before anything starts."""
    apart = settings.model.reference
    if isinstance(apart, SeparateReference) and ":" in apart.device:
        raise InputError(f"model.reference.device = {apart.device!r}: Ray chooses the GPU; write 'cuda'")
    engine, sync = settings.engine, settings.sync.options
    if engine.name not in ENGINES:
        raise InputError(
            f"engine.name = {engine.name!r} does not go with runtime.name = 'ray', which starts the engines itself; "
            f"valid: {', '.join(ENGINES)}"
        )
    if engine.options.get("sleep"):
        raise InputError("engine.sleep has no effect: rollout workers have GPUs of their own; remove it")
    if replicas[0] > replicas[1]:
        raise InputError(f"runtime.rollout_workers = {list(replicas)}: the fewest come first")
    if linger_s is not None and address is None:
        raise InputError("runtime.linger_s has no effect: a cluster of the run's own ends with it; remove it")
    if sync.get("root") is not None:
        raise InputError("sync.root has no effect: weights reach workers through Ray's object store; remove it")
    # Ranks sample nothing here, so rollouts may run ahead of them.
    check_ranks(settings.model_copy(update={"run": settings.run.model_copy(update={"max_lag": 0})}), ranks)
