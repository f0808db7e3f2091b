"""Between stages 4 and 5: which groups are trained."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from podium.errors import InputError
from podium.records import Group, Rollout
from podium.settings.contracts import check_call, is_users, user_code
from podium.settings.lookup import find
from podium.settings.tables import Settings


def build_filter(settings: Settings) -> Callable[[Sequence[Group]], list[Group]]:
    """Groups in, the groups that are trained out, as `[filter]` says."""
    given = settings.filter
    return partial(
        filter_groups,
        needs_signal=given.accept == "signal",
        masks_truncated=given.truncated == "mask",
        accept=build_accept(settings),
    )


def build_accept(settings: Settings) -> Callable[[Group], bool] | None:
    """The function that `filter.accept` names, looked up like any other user code; None for "signal" and "all"."""
    name = settings.filter.accept
    if not is_users(name):
        return None
    found = find("filter", name, "filter.accept")
    check_call("filter", "filter.accept", name, found, {})

    def accept(group: Group) -> bool:
        with user_code("filter.accept", name):
            verdict: Any = found(group)
        if not isinstance(verdict, bool | np.bool_):
            if inspect.iscoroutine(verdict):
                verdict.close()  # nothing will wait for it
            is_short = isinstance(verdict, str | int | float | None)
            shown = repr(verdict) if is_short else f"a {type(verdict).__name__}"
            raise InputError(f"filter.accept = {name!r} returned {shown}; return True or False")
        return bool(verdict)

    return accept


def filter_groups(
    groups: Sequence[Group],
    *,
    needs_signal: bool = True,
    masks_truncated: bool = False,
    accept: Callable[[Group], bool] | None = None,
) -> list[Group]:
    """Drops groups with fewer than two scored rollouts, with `needs_signal` those whose rewards are all equal, and
    those that `accept` refuses. `masks_truncated` takes cut rollouts out of the loss; their rewards stay in the
    baseline."""
    kept = [group for group in groups if sum(reward is not None for reward in group.rewards) > 1]
    if needs_signal:
        kept = [group for group in kept if group.has_signal]
    if accept is not None:
        kept = [group for group in kept if accept(group)]
    if masks_truncated:
        masked = [replace(group, rollouts=tuple(map(_masked_if_cut, group.rollouts))) for group in kept]
        kept = [group for group in masked if group.trainable]
    return kept


def _masked_if_cut(rollout: Rollout) -> Rollout:
    cut = rollout.finish_reason == "length"
    return replace(rollout, loss_mask=(0,) * len(rollout.token_ids)) if cut else rollout
