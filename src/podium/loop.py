"""The training loop, one line per stage. Start reading here.

     ┌─────────────── refill (what the filter dropped) ──┐
     ▼                                                   │
    data ──► rollout ──► reward ──► advantage ──► filter ──► pack ──► trainer ──► report
     ▲         ▲  groups arrive while others are still written         │
     │         └───────────────── sync (proven by a probe) ◄───────────┤
     └──────────────────────── checkpoint (one commit) ◄───────────────┘

Consumes a plan and the stages that a runtime built; produces the final state. It does not know what the stages are
made of or where they run. A window is `sync_every` steps' worth of prompts, sampled with one set of weights; commits
and evaluations fall on window ends, so that a resumed run samples exactly what the unbroken one would have.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

from podium.errors import StalledError
from podium.observer import eagerly
from podium.records import Group, Plan, RunState, StepGroups
from podium.stages import Stages


async def train(stages: Stages, plan: Plan) -> RunState:
    """Trains until the plan's steps are done, the data ends or a signal asks to stop."""
    observer = stages.observer
    if plan.sync_every == 0:
        await observer.pushing(stages.sync.push(0))  # before any restore: the engine keeps the run's first weights
    state = await stages.checkpoint.restore_or_start()
    await observer.during("report", stages.report.start(state))
    if plan.sync_every:
        await observer.pushing(stages.sync.push(state.policy_version))  # the engine holds the current weights, proven
    if state.step == 0 and not observer.stop_requested():
        await observer.during("eval", stages.evaluation.run_if_due(state, since=0))

    observer.start_laps()
    while window := stages.data.draw(state, plan.window_size(state.step)):  #          1    prompts of sync_every steps
        if observer.stop_requested():
            await observer.during("checkpoint", stages.checkpoint.commit(state))
            return state
        window_start = state.step
        observer.start_window()
        groups = observer.writing(stages.rollout(window), window)  #                   2    arriving as they finish
        scored = eagerly(observer.scored(stages.reward.score_each(groups)))  #         3    overlaps generation
        async for step in by_step(scored, stages, plan, state):  #                     4    credited, filtered, refilled
            observer.end("rollout")
            batches = stages.pack(step.kept)  #                                        5
            observer.end("pack")
            result = await observer.training(stages.train, batches)  #                 6+7  loss inside the trainer
            state = stages.data.advance(state, step.drawn).after(step, result)
            seconds = observer.take()
            await observer.during("report", stages.report.write(state, step, result, seconds))  # 10
        if plan.sync_every:
            await observer.pushing(stages.sync.push(state.policy_version))  #          8    if anything was trained
        await observer.during("eval", stages.evaluation.run_if_due(state, since=window_start))
        await observer.during("checkpoint", stages.checkpoint.commit_if_due(state))  # 9
        await give_up_if_stalled(stages, plan, state)
    await observer.during("checkpoint", stages.checkpoint.finish(state))
    return state


async def by_step(
    scored: AsyncIterator[Group], stages: Stages, plan: Plan, state: RunState
) -> AsyncIterator[StepGroups]:
    """The groups of a window, a step's worth at a time; the last may be smaller and trains too.

    With refills a step is full once the filter has kept `prompts_per_step` groups. When the window's groups are all
    there, exactly as many prompts as its steps still miss are drawn, again and again up to the plan's bound.
    """
    missing = plan.window_size(state.step)
    step = StepGroups(plan.prompts_per_step)
    for refills_left in reversed(range(plan.max_refills + 1)):
        async for group in scored:
            credited = stages.assign_advantages([group])
            kept = stages.filter(credited)
            step, missing = step.plus(credited, kept), missing - len(kept)
            if len(step.kept if plan.max_refills else step.drawn) == plan.prompts_per_step:
                yield step
                state = stages.data.advance(state, step.drawn)
                step = StepGroups(plan.prompts_per_step)
        more = stages.data.draw(stages.data.advance(state, step.drawn), missing) if refills_left else []
        if not more:
            break
        groups = stages.observer.writing(stages.rollout(more), more)
        scored = eagerly(stages.observer.scored(stages.reward.score_each(groups, after=step.drawn)))
        step = replace(step, num_refills=step.num_refills + 1)
    if step.drawn:
        yield step


async def give_up_if_stalled(stages: Stages, plan: Plan, state: RunState) -> None:
    """After a commit: what changed nothing so often will not come right by itself."""
    if state.num_skipped_in_a_row >= plan.max_skipped_steps:
        await stages.observer.during("checkpoint", stages.checkpoint.commit(state))
        raise StalledError(
            f"none of the last {state.num_skipped_in_a_row} steps changed the policy: no group had signal, or no "
            "gradient was finite; look at the rollouts and the rewards"
        )
