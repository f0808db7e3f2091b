"""Stages that take their time: a reward that holds one prompt back until a file is there, an engine slower than all."""

import asyncio
import os
import time
from pathlib import Path

from podium.engine.inprocess import Inprocess
from podium.records import Prompt, Rollout
from podium.reward.arithmetic import arithmetic
from podium.reward.scoring.verifiers import declare_range, runs_inline


@runs_inline  # so that it waits in the run's own event loop, beside everything else
@declare_range(0.0, 1.2)
async def dawdling(prompt: Prompt, rollout: Rollout) -> float:
    if str(prompt.ordinal) == os.environ.get("DAWDLE_OVER"):
        while not Path(os.environ["DAWDLE_UNTIL"]).exists():
            await asyncio.sleep(0.01)
    return arithmetic(prompt, rollout)


class Unhurried(Inprocess):
    """Writes so slowly that, on the busiest machine, training is done while something is being written."""

    def _decode(self, arrivals):
        for outcomes in super()._decode(arrivals):
            time.sleep(0.03)
            yield outcomes
