"""The arithmetic reward that kills its own process, for real, at a call given by the environment."""

import os
import signal

from podium.records import Prompt, Rollout
from podium.reward.arithmetic import arithmetic
from podium.reward.scoring.verifiers import declare_range, runs_inline

_calls = 0


@runs_inline  # so that the process it kills is the run's
@declare_range(0.0, 1.2)
def mortal(prompt: Prompt, rollout: Rollout) -> float:
    global _calls
    _calls += 1
    if _calls == int(os.environ.get("KILL_AT_REWARD_CALL", "0")):
        os.kill(os.getpid(), signal.SIGKILL)
    return arithmetic(prompt, rollout)
