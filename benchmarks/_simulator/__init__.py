"""Podium's own loops, played on a clock that jumps, with stages that only take time.

`loop.py`, `loop_async.py`, `flights.py` and the plan (`records.py`) are the real ones, so the schedule is theirs.
Engine, pool, trainer and channel are stand-ins that follow the real ones' rules: parcels go to the worker with the
fewest rollouts in flight, answers come in order or not, one interpreter does all of the driver's work, and every worker
takes new weights and a probe before the next prompt is sent.
"""
