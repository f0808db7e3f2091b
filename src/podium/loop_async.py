"""The training loop with rollouts that run ahead of it; the same stages as in loop.py, which read first.

    who       consumes               produces              waits for
    send      prompts                a flight              room: at most max_lag + 1 steps' worth are under way
    flight    its prompts            scored groups         engine and rewards; several may be in the air
    trainer   a step's worth of      new weights, commits  groups; and before a push for what is being written to be
              groups as they come                          done, unless weights may change in flight

    data ──► send ──► rollout ──► reward ──► waiting ──► pack ──► trainer ──► report ──► push ──┐
             ▲  ▲                               │ too old                                       │
             │  └────── again, same ordinal ◄───┘                                               │
             └─────────────────────────── room for another step's worth ◄───────────────────────┘

A prompt is under way from when it is sent until its step is trained. It is sent only while the engine holds the
trainer's weights, with fewer than max_lag + 1 steps' worth before it; so groups that come in the order in which they
were sent are never too old. One that later ones overtook (a long answer, a slow reward) may be, and is sampled again.
The trainer's weights are changed (step) and read (push, commit) by one coroutine, so never at the same time.
"""

from podium.flights import Flights
from podium.loop import give_up_if_stalled
from podium.records import Plan, RunState
from podium.stages import Stages


async def train(stages: Stages, plan: Plan) -> RunState:
    """Trains until the plan's steps are done, the data ends or a signal asks to stop."""
    observer = stages.observer
    state = await stages.checkpoint.restore_or_start()
    await observer.during("report", stages.report.start(state))
    await observer.pushing(stages.sync.push(state.policy_version))  # the engine holds the current weights, proven
    if state.step == 0 and not observer.stop_requested():
        await observer.during("eval", stages.evaluation.run_if_due(state, since=0))

    observer.start_laps()
    async with Flights(stages, plan) as flights:  # what is under way at the end is dropped
        while state.step < plan.steps and stages.data.draw(state, 1):
            step = await flights.next_step(state)  #                                   1-4  groups, none too old
            if observer.stop_requested():
                await observer.during("checkpoint", stages.checkpoint.commit(state))
                return state
            observer.end("rollout")
            batches = stages.pack(step.kept)  #                                        5
            observer.end("pack")
            assert all(state.policy_version - group.oldest_version <= plan.max_lag for group in step.kept)
            result = await observer.training(stages.train, batches)  #                 6+7  meanwhile others are written
            flights.end(step)
            state = stages.data.advance(state, step.drawn, flights.under_way).after(step, result)
            seconds = observer.take()
            await observer.during("report", stages.report.write(state, step, result, seconds))  # 10
            if not plan.in_flight:
                await flights.written()
                observer.end("rollout")
            await observer.pushing(stages.sync.push(state.policy_version))  #          8    if anything was trained
            await observer.during("eval", stages.evaluation.run_if_due(state, since=state.step - 1))
            flights.send(state)  # after the evaluation
            await observer.during("checkpoint", stages.checkpoint.commit_if_due(state))  # 9
            await give_up_if_stalled(stages, plan, state)
    await observer.during("checkpoint", stages.checkpoint.finish(state))
    return state
