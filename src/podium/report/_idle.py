"""Steps that trained nothing: why, in words, and when that is worth a warning."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from podium.records import StepGroups, UpdateResult

FIRST_WARNING = 3
"""Steps in a row without an update; the next warning comes after twice as many, and so on."""

ZERO_GRADIENT = "the gradient is 0: the loss or every advantage is 0, or too small a number to count"


def is_zero_gradient(metrics: Mapping[str, Any]) -> bool:
    """Whether a step made an update that had nothing to go by."""
    return metrics.get("optim/grad_norm") == 0.0 and not metrics.get("optim/skipped")


def why_idle(step: StepGroups, result: UpdateResult) -> str | None:
    """Why the step changed nothing; None if it did."""
    if result.updated:
        return ZERO_GRADIENT if is_zero_gradient(result.metrics) else None
    rollouts = [rollout for group in step.drawn for rollout in group.rollouts]
    rewards = [reward for group in step.drawn for reward in group.rewards]
    scored = [reward for reward in rewards if reward is not None]
    if not rollouts:
        return "the engine failed at every prompt"
    if not scored:
        return "no rollout has a reward: every reward failed or abstained"
    if step.kept:
        return "the loss or its gradient was not finite" if result.num_loss_tokens else "no token was left to train on"
    cut = all(rollout.finish_reason == "length" for rollout in rollouts)
    also = "; every answer was cut at rollout.max_new_tokens" if cut else ""
    if not any(group.has_signal for group in step.drawn):
        return _without_signal(step, scored) + also
    if cut:
        return 'every answer was cut at rollout.max_new_tokens, and filter.truncated = "mask" leaves those out'
    return "filter.accept, or filter.truncated, left no group"


def _without_signal(step: StepGroups, scored: list[float]) -> str:
    if not any(sum(reward is not None for reward in group.rewards) > 1 for group in step.drawn):
        return "no group has two rollouts with a reward: most rewards failed or abstained"
    if len({*scored}) == 1:
        return f"every reward is {scored[0]:.4g}"
    return "the rewards within each group are all equal"


class IdleSteps:
    """Counts them over a run of this process."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._warn_at = FIRST_WARNING

    def seen(self, reason: str | None) -> str | None:
        """Takes a step's reason; a warning where enough of them came in a row."""
        if reason is None:
            self._in_a_row.clear()
            self._warn_at = FIRST_WARNING
            return None
        self._reasons[reason] += 1
        self._in_a_row[reason] += 1
        if self._in_a_row.total() < self._warn_at:
            return None
        self._warn_at *= 2
        return f"{self._in_a_row.total()} steps in a row trained nothing: {_told(self._in_a_row)}. {ADVICE}"

    @property
    def reasons(self) -> str:
        """Of all of them, the most frequent first."""
        return _told(self._reasons) if self._reasons else "see reward/mean and batch/kept_ratio of its steps"


ADVICE = (
    "Look at the rollouts on the page; take prompts that the model solves now and then, more rollouts_per_prompt, a "
    "reward with degrees, or a higher rollout.max_new_tokens."
)


def _told(reasons: Counter[str]) -> str:
    if len(reasons) == 1:
        return next(iter(reasons))
    return ", ".join(f"{reason} ({count}×)" for reason, count in reasons.most_common(3))
