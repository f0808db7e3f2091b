"""Where the tasks of a run execute: four environments, each with what its work needs and no more.

Rollout containers stay warm: loading an engine takes longer than a step. They are the run's own and scale by demand.
`configure` puts the options of `[runtime]` in the place of the defaults, before tasks are sent.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podium.runtime._flyte.images import ALWAYS, extras_of, image_with
from podium.runtime._flyte.sdk import flyte
from podium.settings import Settings

RETRIES = 3
"""Times that a task is tried again: after a lost container, and after an error that Podium does not know."""

MAX_INLINE_BYTES = 1 << 30
"""Of what is passed to a task directly: the tokens of a step. Weights and optimizer travel as folders."""


class Installed:
    """Tells containers where a task is: in Podium, which their image has. Flyte itself looks for tasks below the
    working folder or in site-packages, and a checkout is in neither."""

    import_path = "flyte._internal.resolvers.default.DefaultTaskResolver"

    def loader_args(self, task: Any, root_dir: Path) -> list[str]:
        return ["mod", task.func.__module__, "instance", task.func.__name__]


IN_PODIUM: dict[str, Any] = {"retries": RETRIES, "max_inline_io_bytes": MAX_INLINE_BYTES, "task_resolver": Installed()}
"""What every task is defined with."""

IMAGE = image_with(ALWAYS)

rollout_environment = flyte.TaskEnvironment(
    "podium_rollout",
    image=IMAGE,
    resources=flyte.Resources(cpu=4, memory="16Gi", gpu=1),
    reusable=flyte.ReusePolicy(replicas=(1, 4), concurrency=1, idle_ttl=300, scaledown_ttl=120, scope="run"),
    description="Writes rollouts: an engine on a GPU, warm between steps.",
)
reward_environment = flyte.TaskEnvironment(
    "podium_reward",
    image=IMAGE,
    resources=flyte.Resources(cpu=2, memory="4Gi"),
    description="Scores one group a task.",
)
trainer_environment = flyte.TaskEnvironment(
    "podium_trainer",
    image=IMAGE,
    resources=flyte.Resources(cpu=4, memory="32Gi", gpu=1),
    description="One optimizer step a task.",
)
driver_environment = flyte.TaskEnvironment(
    "podium_driver",
    image=IMAGE,
    resources=flyte.Resources(cpu=2, memory="8Gi"),
    depends_on=[rollout_environment, reward_environment, trainer_environment],
    description="Runs the training loop; holds no weights.",
)
EVERY = (rollout_environment, reward_environment, trainer_environment, driver_environment)


def configure(settings: Settings) -> None:
    """The meaning of the options of `[runtime]` stands in runtime/flyte.py."""
    options = settings.runtime.options
    for_rollouts = flyte.Resources(cpu=4, memory=options["rollout_memory"], gpu=_gpu(options["rollout_gpu"]))
    for_trainer = flyte.Resources(cpu=4, memory=options["trainer_memory"], gpu=_gpu(options["trainer_gpu"]))
    warm, hub_token_from = options["warm"], options["hub_token_from"]
    pool = flyte.ReusePolicy(
        replicas=tuple(options["replicas"]), concurrency=1, idle_ttl=300, scaledown_ttl=120, scope="run"
    )
    _set(rollout_environment, resources=for_rollouts, reusable=pool)
    _set(trainer_environment, resources=for_trainer, reusable=_warm((1, 1)) if "trainer" in warm else None)
    _set(reward_environment, reusable=_warm((1, 4)) if "reward" in warm else None)
    token = flyte.Secret(key=hub_token_from, as_env_var="HF_TOKEN") if hub_token_from else None
    extras = extras_of(settings)
    of_rollouts = extras | {"vllm"} if settings.engine.name == "vllm_local" else extras
    for environment in EVERY:
        own = image_with(of_rollouts if environment is rollout_environment else extras)
        _set(environment, image=flyte.Image.from_base(options["image"]) if options["image"] else own, secrets=token)


def include(files: Sequence[str]) -> None:
    """Files of this machine that go along with the driver, which hands them on to its tasks."""
    driver_environment.include = tuple(str(Path(file).absolute()) for file in files)


def _warm(replicas: tuple[int, int]) -> flyte.ReusePolicy:
    return flyte.ReusePolicy(replicas=replicas, concurrency=1, idle_ttl=300, scaledown_ttl=120, scope="run")


def _gpu(given: str) -> Any:
    """Flyte takes a number, or a kind and a number; 0 is a container without one."""
    return (int(given) or None) if given.isdigit() else given


def _set(environment: flyte.TaskEnvironment, **values: Any) -> None:
    """A task takes these from its environment when it is defined, so it is told as well."""
    for name, value in values.items():
        for thing in (environment, *environment.tasks.values()):
            setattr(thing, name, value)
