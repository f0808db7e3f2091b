"""The runtime that spreads a run over Ray: rollout workers, reward workers and the trainer are actors. The loop stays
in the driver's process, which writes all files.

    driver: loop ──► RolloutWorkers ──► rollout actors, each an engine        groups and weights go
              │  ──► RewardActors ────► reward actors                         through the object store
              └────► RemoteTrainer ───► trainer actor, one per rank ──► weights ──► rollout actors
                     (RemoteReference ► reference actor, if model.reference has its own device)
"""

import importlib.util
import os
import secrets
import sys
from typing import Annotated

from pydantic import Field

from podium.errors import InputError
from podium.run.folder import RunFolder
from podium.runtime.ranks.launch import check_ranks
from podium.runtime.wiring.stages import Placed
from podium.settings.refusals import of_ray, refuse
from podium.settings.tables import Settings

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
    step: int | None,
    *,
    ranks: Annotated[int, Field(ge=1, description="actors that train together, one a GPU")] = 1,
    rollout_workers: Annotated[
        Count | tuple[Count, Count], Field(description="actors that sample, or the fewest and the most of them")
    ] = 1,
    reward_workers: Annotated[int, Field(ge=1, description="actors that score")] = 1,
    gpus_per_rollout_worker: Annotated[
        float | None,
        Field(ge=0, description="may be a fraction; by default engine.tensor_parallel where Ray has GPUs, else 0"),
    ] = None,
    gpus_per_rank: Annotated[
        float | None, Field(ge=0, description="may be a fraction; by default 1 where Ray has GPUs, else 0")
    ] = None,
    cpus_per_worker: Annotated[float, Field(gt=0, description="CPUs that each actor asks Ray for")] = 1.0,
    address: Annotated[
        str | None, Field(description="of a Ray cluster: auto or host:port; by default a new cluster on this machine")
    ] = None,
    linger_s: Annotated[
        Seconds | None,
        Field(description="seconds that workers at an address wait for a driver to come back; by default 300"),
    ] = None,
    start_s: Annotated[Seconds, Field(description="seconds for workers to start and load the model")] = 600.0,
    frozen_s: Annotated[Seconds, Field(description="seconds of silence after which a worker counts as dead")] = 10.0,
    stalled_s: Annotated[
        Seconds,
        Field(
            description="seconds without a token after which a rollout worker counts as dead; a batch must take less"
        ),
    ] = 60.0,
    recovery_s: Annotated[
        Seconds, Field(description="seconds without any worker of a kind after which the run fails")
    ] = 300.0,
    max_restarts: Annotated[int, Field(ge=0, description="starts in a row that may fail per replica")] = 5,
) -> Placed:
    """Starts the workers and makes the stages, writing nothing; `step` names the checkpoint to continue from."""
    refuse(settings, of_ray)
    check_ranks(settings, ranks)
    prepare_import(address)
    from podium.runtime.on_ray.run_actors import place

    return place(settings, folder, step)


ray.channels = ("adapter", "disk")  # type: ignore[attr-defined]
ray.starts_ranks = True  # type: ignore[attr-defined]


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
