"""data → rollout → reward on held-out prompts, with a sampling of its own."""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from statistics import fmean

from podium.records import EvalReport, Group, Prompt, RunState
from podium.stages import RewardStage, RolloutStage


async def held_out_groups(
    rollout: RolloutStage,
    reward: RewardStage,
    prompts: Sequence[Prompt],
    beat: Callable[[str], None] = lambda stage: None,
) -> list[Group]:
    """Every prompt's rollouts, scored; prompts that an engine failed at are left out."""

    async def written() -> AsyncIterator[Group]:
        async for group in rollout.start(prompts):
            beat("evaluation")
            yield group

    return [group async for group in reward.score_each(written()) if group.rollouts]


def eval_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`eval/*`: mean over prompts of each one's mean over its rollouts; what rewards counted on the way is summed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [[reward for reward in group.rewards if reward is not None] for group in groups]
    correct = [[value for value in group.correct if value is not None] for group in groups]
    metrics = {
        "eval/reward_mean": fmean(fmean(values) for values in rewards if values) if any(rewards) else 0.0,
        "eval/stop_rate": fmean(rollout.finish_reason == "stop" for rollout in rollouts),
        "eval/length_mean": fmean(len(rollout.token_ids) for rollout in rollouts),
        "eval/prompts": float(len(groups)),
    }
    for group in groups:
        for name, value in group.reward_counts.items():
            metrics[f"eval/{name}"] = metrics.get(f"eval/{name}", 0.0) + value
    if any(correct):
        metrics = {"eval/accuracy": fmean(fmean(values) for values in correct if values), **metrics}
    return metrics


class HeldOut:
    """Evaluates before the first step, every `every` steps and once `is_over`; `tell` takes the report."""

    def __init__(
        self,
        rollout: RolloutStage,
        reward: RewardStage,
        prompts: Sequence[Prompt],
        is_over: Callable[[RunState], bool],
        every: int,
        tell: Callable[[EvalReport], None],
        beat: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """`beat` is told with each group that the evaluation gets on."""
        self._rollout, self._reward, self._prompts = rollout, reward, prompts
        self._is_over, self._every, self._tell, self._beat = is_over, every, tell, beat

    async def run_if_due(self, state: RunState, since: int) -> None:
        if not self._prompts or not self._is_due(state, since):
            return
        started = time.monotonic()
        groups = await held_out_groups(self._rollout, self._reward, self._prompts, self._beat)
        version = groups[0].rollouts[0].policy_version_max  # of the engine, which may not follow the trainer
        self._tell(EvalReport(state.step, version, eval_metrics(groups), time.monotonic() - started))

    def _is_due(self, state: RunState, since: int) -> bool:
        """A window may carry the step past the exact multiple."""
        passed = self._every > 0 and state.step // self._every > since // self._every
        return state.step == 0 or passed or self._is_over(state)
