"""The runtime that spreads a run over Ray: rollout workers, reward workers and the trainer are actors. The loop stays
in the driver's process, which writes all files.

    driver: loop ──► RolloutWorkers ──► rollout actors, each an engine        groups and weights go
              │  ──► RewardActors ────► reward actors                         through the object store
              └────► RemoteTrainer ───► trainer actor, one per rank ──► weights ──► rollout actors
                     (RemoteReference ► reference actor, if model.reference has its own device)
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from podium.data.build import ReadSource, build_run_data
from podium.errors import InputError
from podium.model.load import load_reader
from podium.remote.pool import Rules
from podium.reward.build import check_retirement, check_scoring, scoring_recipe
from podium.rollout.build import make_rollout_for
from podium.run.build import check_space
from podium.run.folder import RunFolder
from podium.runtime.ranks.launch import check_ranks
from podium.runtime.wiring.stages import Placed, Wired, read_rows, train_step, wire
from podium.settings.refusals import of_ray, refuse
from podium.settings.sections import SeparateReference
from podium.settings.tables import Settings
from podium.sync.build import build_delivery, build_sync

if TYPE_CHECKING:
    from podium.runtime.on_ray.run_actors import RunActors

OWN = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # which means: one node, on loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # an actor that asks for no GPU sees none
    "RAY_process_group_cleanup_enabled": "true",
    "RAY_worker_niceness": "0",  # the actors are the run itself
}
"""Environment of a cluster that the run starts; Ray reads it when it is imported, and so do its processes."""
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
    refuse(settings, of_ray)
    # Ranks sample nothing here, so rollouts may run ahead of them.
    check_ranks(settings.model_copy(update={"run": settings.run.model_copy(update={"max_lag": 0})}), ranks)
    rows = read_rows(settings)
    prepare_import(address)
    from podium.runtime.on_ray.cluster import Cluster
    from podium.runtime.on_ray.run_actors import Needs, RunActors

    references = int(isinstance(settings.model.reference, SeparateReference))
    gpus = gpus_per_rollout_worker, gpus_per_rank
    asked = cpus_per_worker, stalled_s
    needs = Needs(replicas, reward_workers, ranks, references, *gpus, *asked)
    rules = Rules(replicas, 1, max_restarts, start_s, recovery_s, frozen_s)
    actors = RunActors(settings, folder, needs, rules, Cluster(address, folder.run_id, needs.num_cpus, linger_s))
    try:
        return wire(
            settings, folder, _placed(settings, folder, step, actors, *rows), stop_requested, step, console_mode
        )
    except BaseException:
        actors.close()
        raise


ray.channels = ("adapter", "disk")  # type: ignore[attr-defined]
ray.starts_ranks = True  # type: ignore[attr-defined]


def _placed(
    settings: Settings,
    folder: RunFolder,
    step: int | None,
    actors: RunActors,
    rows: Sequence[ReadSource],
    held_out_rows: Sequence[ReadSource],
) -> Placed:
    """Starts the actors, and makes of them what the loop needs."""
    from podium.runtime.on_ray.trainer import StoreDelivery

    reader = load_reader(settings.model)
    data = build_run_data(settings, rows, held_out_rows, reader)
    policy = actors.start(reader.tokenizer, data.longest_prompt)
    memory = actors.prepare(data.plan.steps, max(data.train.lengths), scoring_recipe(settings, data.sources))
    trainer, engine, scoring = actors.trainer, actors.engine, actors.rewards.scoring
    check_scoring(scoring, data.sources)
    check_retirement(settings, scoring, data.train)
    check_space(settings, folder, memory, step)
    between = (trainer, engine, policy, data.train.in_order, folder.path, folder.run_id)
    return Placed(
        data=data,
        tokenizer=policy.tokenizer,
        scoring=scoring,
        rollout=partial(make_rollout_for, settings, engine, policy),
        engine=engine,
        trainer=trainer,
        train=partial(train_step, trainer, actors.reference, None),
        sync=build_sync(settings, build_delivery(settings, *between, StoreDelivery)),
        memory=memory,
        base_digest=policy.base_digest,
        begin=trainer.load_start,
        ranks=settings.runtime.options["ranks"],
        end=actors.close,
    )


def prepare_import(address: str | None) -> None:
    """Sets what Ray reads from the environment as it is imported.

    Ray's processes run whatever they are sent. A cluster that this run starts therefore listens on loopback only and
    asks for a token, which ends with this process.
    """
    if importlib.util.find_spec("ray") is None:
        raise InputError("runtime.name = 'ray' needs Ray: pip install 'podium-rl[ray]'")
    if address is not None:
        if "://" in address:
            raise InputError(f"runtime.address = {address!r}: give 'auto' or host:port")
        return
    if "ray" in sys.modules and os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0":
        raise InputError(
            "ray was imported before podium could see to it that a cluster of the run's own is on loopback; set "
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before that import, or give runtime.address"
        )
    os.environ |= OWN
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
