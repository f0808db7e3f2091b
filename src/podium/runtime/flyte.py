"""The runtime that runs the stages as Flyte tasks, on a cluster or in this process.

Rollouts run in a warm pool of GPU containers, rewards in one task per group, optimizer steps on a GPU of their own, and
the loop in a driver that holds no weights. The command starts the driver's task (`on_flyte/driver.py`), which calls
`flyte`.
"""

import importlib.util
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.errors import InputError
from podium.run.folder import RunFolder
from podium.runtime.ranks.launch import check_ranks
from podium.runtime.wiring.stages import Placed
from podium.settings.lookup import option_fields
from podium.settings.refusals import of_flyte, refuse
from podium.settings.tables import Settings

EVERYWHERE = ("mode", "replicas", "prompts_per_task")
"""Options that have an effect in both modes; the others are about containers."""

Pair = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]


def flyte(
    settings: Settings,
    folder: RunFolder,
    step: int | None,
    *,
    mode: Annotated[
        Literal["local", "remote"],
        Field(description="local: the same tasks in this process; remote: on the cluster of your Flyte configuration"),
    ] = "local",
    replicas: Annotated[Pair, Field(description="fewest and most rollout containers")] = (1, 4),
    prompts_per_task: Annotated[
        int | None, Field(ge=1, description="prompts of one rollout task; by default an equal share for each replica")
    ] = None,
    warm: Annotated[
        list[Literal["reward", "trainer"]],
        Field(description="further containers that stay between tasks: no cold start per step, but a GPU waits"),
    ] = [],  # noqa: B006
    rollout_gpu: Annotated[
        str, Field(description="of a rollout container, as Flyte names it: '1', 'L4:1'; '0' is none")
    ] = "1",
    trainer_gpu: Annotated[str, Field(description="of the trainer's container")] = "1",
    rollout_memory: Annotated[str, Field(description="of a rollout container")] = "16Gi",
    trainer_memory: Annotated[str, Field(description="of the trainer's container")] = "32Gi",
    image: Annotated[
        str | None,
        Field(
            description="container image; by default one is built with this Podium, and with vLLM if vLLM is the engine"
        ),
    ] = None,
    hub_token_from: Annotated[
        str | None, Field(description="name of the Flyte secret that holds the model hub's token")
    ] = None,
) -> Placed:
    """Makes the stages, inside the driver's task; `step` names the checkpoint to continue from."""
    from podium.runtime.on_flyte.driver import current
    from podium.runtime.on_flyte.stages import place

    driving = current.get()
    assert driving is not None, "called by the driver's task"
    return place(driving, settings, folder, step)


def launcher(settings: Settings) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """The function that starts the driver; None inside the driver."""
    if importlib.util.find_spec("flyte") is None:
        raise InputError("runtime.name = 'flyte' needs flyte, which is not installed: pip install 'podium-rl[flyte]'")
    from podium.runtime.on_flyte.driver import current, run_locally, run_on_cluster

    if current.get() is not None:
        return None
    check_settings(settings)
    return run_locally if settings.runtime.options["mode"] == "local" else run_on_cluster


flyte.launcher = launcher  # type: ignore[attr-defined]


def check_settings(settings: Settings) -> None:
    """Refuses what would have no effect, or could not work, with stages in containers of their own."""
    check_ranks(settings, 1)
    refuse(settings, of_flyte)
    options = settings.runtime.options
    if options["mode"] == "local":
        for name, (_, default) in option_fields(flyte).items():
            if name not in EVERYWHERE and options[name] != default:
                raise InputError(
                    f"runtime.{name} has no effect with runtime.mode = 'local', which has no containers; remove it, or "
                    "set mode = 'remote'"
                )
