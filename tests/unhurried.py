"""An engine that is slower than all else."""

import time

from podium.engine.inprocess import Inprocess


class Unhurried(Inprocess):
    """Writes so slowly that, on the busiest machine, training is done while something is being written."""

    def _advance(self, slots, ids) -> None:
        time.sleep(0.01)
        super()._advance(slots, ids)
