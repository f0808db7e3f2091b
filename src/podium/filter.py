"""Between stages 4 and 5: which groups are trained."""

from collections.abc import Sequence

from podium.records import Group


def filter_groups(groups: Sequence[Group], *, drop_no_signal: bool = True) -> list[Group]:
    """Drops groups with fewer than two scored rollouts, and by default those whose rewards are all equal."""
    scored = [group for group in groups if sum(reward is not None for reward in group.rewards) > 1]
    return [group for group in scored if group.has_signal] if drop_no_signal else scored
