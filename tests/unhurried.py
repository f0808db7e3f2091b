"""An engine that is slower than all else."""

import time

from podium.engine.inprocess import Inprocess


class Unhurried(Inprocess):
    """Writes so slowly that, on the busiest machine, training is done while something is being written."""

    def _decode(self, arrivals):
        for outcomes in super()._decode(arrivals):
            time.sleep(0.03)
            yield outcomes
