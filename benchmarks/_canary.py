"""A process beside a run, in a session of its own: prints how many seconds a second of CPU takes, burst by burst."""

import time

from _simulator.scenario import CANARY_EVERY_S, CANARY_S


def burst() -> float:
    wall, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < CANARY_S:
        pass
    return (time.monotonic() - wall) / (time.process_time() - cpu)


if __name__ == "__main__":
    while True:
        print(burst(), flush=True)
        time.sleep(CANARY_EVERY_S)
