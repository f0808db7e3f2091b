"""The faster of `inprocess` and `vllm_local` for this run, found by trying both before it starts.

It is never an engine itself: `podium train` measures both (check/calibrate.py), prints the choice, and writes it into
the run's own settings, so a resume does not choose again. Commands that only evaluate a model use `inprocess`.
"""

from podium.errors import InputError
from podium.model.load import Policy
from podium.records import EngineTraits


class Auto:
    traits = EngineTraits(channels=("shared", "adapter", "disk"), candidates=("inprocess", "vllm_local"))

    def __init__(self, policy: Policy, snapshot: bool = False) -> None:
        raise InputError(
            f"engine.name = 'auto' is for `podium train`; here name one: {', '.join(self.traits.candidates)}"
        )
