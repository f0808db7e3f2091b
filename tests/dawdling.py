"""A reward that holds one prompt back until a file is there. No torch: a worker would take seconds to import it."""

import asyncio
import os
from pathlib import Path

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
