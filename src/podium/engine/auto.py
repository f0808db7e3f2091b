"""The faster of `inprocess` and `vllm_local` for this run, found by trying both before it starts.

Never an engine itself: `podium train` measures (check/calibrate.py), says what it takes, and the run's own settings
name that one, so that a resume does not choose again. What only looks at a model (`eval`, `check`) takes `inprocess`.
"""

from podium.errors import InputError
from podium.model.load import Policy
from podium.records import EngineTraits

CANDIDATES = ("inprocess", "vllm_local")
"""The first is always there."""


class Auto:
    traits = EngineTraits(channels=("shared", "adapter", "disk"))

    def __init__(self, policy: Policy, snapshot: bool = False) -> None:
        raise InputError(f"engine.name = 'auto' is for `podium train`; here name one: {', '.join(CANDIDATES)}")
