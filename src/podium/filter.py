"""Between stages 4 and 5: which groups are trained."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from podium.records import Group, Rollout


def filter_groups(
    groups: Sequence[Group],
    *,
    drop_no_signal: bool = True,
    truncated: str = "keep",
    accept: Callable[[Group], bool] | None = None,
) -> list[Group]:
    """Drops groups with fewer than two scored rollouts, by default those whose rewards are all equal, and those that
    `accept` refuses. `truncated = "mask"` takes cut rollouts out of the loss; their rewards stay in the baseline."""
    kept = [group for group in groups if sum(reward is not None for reward in group.rewards) > 1]
    if drop_no_signal:
        kept = [group for group in kept if group.has_signal]
    if accept is not None:
        kept = [group for group in kept if accept(group)]
    if truncated == "mask":
        masked = [replace(group, rollouts=tuple(map(_masked_if_cut, group.rollouts))) for group in kept]
        kept = [group for group in masked if group.trainable]
    return kept


def _masked_if_cut(rollout: Rollout) -> Rollout:
    cut = rollout.finish_reason == "length"
    return replace(rollout, loss_mask=(0,) * len(rollout.token_ids)) if cut else rollout
