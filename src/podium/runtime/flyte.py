"""The runtime that runs the stages as Flyte tasks, on a cluster or in this process.

Rollouts in a warm pool of GPU containers, a reward task a group, optimizer steps on a GPU of their own, and the loop in
a driver that holds no weights. The command starts the driver's task (`_flyte/front.py`); inside it this is called.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.errors import InputError
from podium.lookup import option_fields
from podium.run_folder import RunFolder
from podium.runtime._build import Wired
from podium.runtime._core import check_ranks
from podium.runtime._launch import launched_by
from podium.sections import SeparateReference
from podium.settings import Settings

ENGINES = ("inprocess", "vllm_local")
"""Those that live in the container that asks them."""
EVERYWHERE = ("mode", "replicas", "prompts_per_task")
"""Options that count in both modes; the others are about containers."""

Pair = tuple[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=1)]]


def launcher(settings: Settings) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """What starts the driver; None inside it."""
    from podium.runtime._flyte.front import check_installed, run_locally, run_on_cluster

    check_installed()
    from podium.runtime._flyte.driver import driving

    if driving() is not None:
        return None
    check_settings(settings)
    return run_locally if settings.runtime.options["mode"] == "local" else run_on_cluster


@launched_by(launcher)
def flyte(
    settings: Settings,
    folder: RunFolder,
    stop_requested: Callable[[], bool],
    step: int | None = None,
    console_mode: str | None = None,
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
        Field(description="further containers that stay between tasks: no cold start a step, for a GPU that waits"),
    ] = [],  # noqa: B006
    rollout_gpu: Annotated[
        str, Field(description="of a rollout container, as Flyte names it: '1', 'L4:1'; '0' is none")
    ] = "1",
    trainer_gpu: Annotated[str, Field(description="of the trainer's container")] = "1",
    rollout_memory: Annotated[str, Field(description="of a rollout container")] = "16Gi",
    trainer_memory: Annotated[str, Field(description="of the trainer's container")] = "32Gi",
    image: Annotated[
        str | None,
        Field(description="container image; by default one is built with this very Podium, and vLLM if it samples"),
    ] = None,
    hub_token_from: Annotated[
        str | None, Field(description="name of the Flyte secret that holds the model hub's token")
    ] = None,
) -> Wired:
    """Wires the stages inside the driver's task; `step` names the checkpoint to go on from."""
    from podium.runtime._flyte.driver import driving
    from podium.runtime._flyte.environments import configure
    from podium.runtime._flyte.wiring import wire

    now = driving()
    assert now is not None, "called by the driver's task"
    configure(settings)
    return wire(now, settings, folder, stop_requested, step, console_mode, replicas[1], prompts_per_task)


def check_settings(settings: Settings) -> None:
    """What would have no effect, or could not work, with stages in containers of their own."""
    check_ranks(settings, 1)
    _refuse_reference_apart(settings)
    options = settings.runtime.options
    if options["replicas"][0] > options["replicas"][1]:
        raise InputError(f"runtime.replicas = {list(options['replicas'])}: the fewest are more than the most")
    if options["mode"] == "local":
        for name, (_, default) in option_fields(flyte).items():
            if name not in EVERYWHERE and options[name] != default:
                raise InputError(
                    f"runtime.{name} has no effect with runtime.mode = 'local', which has no containers; remove it, or "
                    "set mode = 'remote'"
                )
    if settings.engine.name not in ENGINES and ":" not in settings.engine.name:
        raise InputError(
            f"engine.name = {settings.engine.name!r} does not go with runtime.name = 'flyte', whose containers each "
            f"have an engine; valid: {', '.join(ENGINES)}"
        )
    if settings.engine.options.get("sleep"):
        raise InputError("engine.sleep has no effect with runtime.name = 'flyte': trainer and engine share no GPU")
    if settings.run.in_flight:
        raise InputError("run.in_flight does not go with runtime.name = 'flyte': a task has one policy version")
    if (
        settings.sync.name == "nccl"
        or settings.sync.options.get("root")
        or settings.sync.options.get("scope") == "engine"
    ):
        raise InputError("[sync] has no effect with runtime.name = 'flyte': weights travel in its store; remove it")
    if settings.model.dtype == "bfloat16" and settings.engine.name == "inprocess":
        raise InputError(
            "model.dtype = 'bfloat16' with engine 'inprocess' samples through the trainer's own adapter layers, which "
            "are in another container; use model.dtype = 'float32' with trainer.precision = 'bfloat16', or 'vllm_local'"
        )


def _refuse_reference_apart(settings: Settings) -> None:
    if isinstance(settings.model.reference, SeparateReference):
        raise InputError(
            "model.reference.device does not go with runtime.name = 'flyte'; use model.reference = 'initial', which "
            "the trainer's task keeps, or runtime.name = 'local' or 'ray'"
        )
