"""Podium: reinforcement learning for language models.

`podium.train(podium.Settings.from_toml("run.toml"))` does what `podium train run.toml` does. Importing the package
loads nothing heavy: torch comes in with the first name that needs it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from podium.records import Group, Observation, Prompt, Rollout, Row

if TYPE_CHECKING:
    from podium.reward.scoring.verifiers import checks_answer, declare_range, gold_answer, register_reward, runs_inline
    from podium.run.start import evaluate, train
    from podium.settings.tables import Settings

# Before torch. Threads that spin while they wait make a step many times slower where another process wants their cores,
# and threads that sleep at once are woken for every product: some microseconds lie between.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}

__version__ = "0.1.0"
__all__ = [
    "Group",
    "Observation",
    "Prompt",
    "Rollout",
    "Row",
    "Settings",
    "checks_answer",
    "declare_range",
    "evaluate",
    "gold_answer",
    "register_reward",
    "runs_inline",
    "train",
]

_LAZY = {
    "Settings": "podium.settings.tables",
    "checks_answer": "podium.reward.scoring.verifiers",
    "declare_range": "podium.reward.scoring.verifiers",
    "evaluate": "podium.run.start",
    "gold_answer": "podium.reward.scoring.verifiers",
    "register_reward": "podium.reward.scoring.verifiers",
    "runs_inline": "podium.reward.scoring.verifiers",
    "train": "podium.run.start",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'podium' has no attribute {name!r}")
