"""Faults that a job of the fork server prepares in itself, told by the environment; each is the real thing."""

import os
import random
import signal
import threading
import time

import podium.run.checkpoint
from podium.run.checkpoint import write_checkpoint


def kill_in_save() -> None:
    """A SIGKILL at a random moment of the save numbered KILL_IN_SAVE, by a thread that waits for it to begin."""
    number, rng = int(os.environ["KILL_IN_SAVE"]), random.Random(os.environ["KILL_SEED"])
    count = 0

    def write(*args, **kwargs):
        nonlocal count
        count += 1
        if count == number:
            threading.Thread(target=_die_after, args=(rng.uniform(0, 0.02),), daemon=True).start()
        return write_checkpoint(*args, **kwargs)

    podium.run.checkpoint.write_checkpoint = write


def _die_after(seconds: float) -> None:
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)
