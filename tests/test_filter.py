from dataclasses import replace

from podium.filter import filter_groups
from podium.pack import pack
from tests.builders import make_group, make_rollout
from tests.test_pack import a_group


def scored(ordinal: int, rewards: tuple[float | None, ...]):
    made = a_group(ordinal, (7,), [(1,) * (k + 1) for k in range(len(rewards))], [0.5] * len(rewards))
    return replace(made, rewards=rewards)


def ordinals(groups) -> list[int]:
    return [group.prompt.ordinal for group in groups]


def test_groups_whose_rewards_are_equal_are_dropped_by_default() -> None:
    groups = [scored(0, (1.0, 1.0)), scored(1, (1.0, 0.0))]
    assert ordinals(filter_groups(groups)) == [1]
    assert ordinals(filter_groups(groups, needs_signal=False)) == [0, 1]


def test_a_group_with_fewer_than_two_scored_rollouts_is_dropped_always() -> None:
    groups = [scored(0, (1.0, None)), scored(1, (None, None)), scored(2, (1.0, None, 0.0))]
    assert ordinals(filter_groups(groups, needs_signal=False)) == [2]


def test_accept_has_a_say() -> None:
    groups = [scored(ordinal, (1.0, 0.0)) for ordinal in range(4)]
    assert ordinals(filter_groups(groups, accept=lambda group: group.prompt.ordinal % 2 == 1)) == [1, 3]


def test_masked_truncated_rollouts_leave_the_loss_and_the_denominators_but_not_the_baseline() -> None:
    group = scored(0, (1.0, 0.0, 0.0))
    cut = replace(group.rollouts[2], finish_reason="length")
    group = replace(group, rollouts=(*group.rollouts[:2], cut))
    [masked] = filter_groups([group], masks_truncated=True)
    assert masked.advantages == group.advantages
    [batch] = pack([masked], max_tokens_per_batch=99, temperature=1.0)
    assert (batch.num_rollouts, batch.num_loss_tokens) == (2, 3)  # answers of 1 and 2 tokens; that of 3 is out
    [whole] = pack(filter_groups([group]), max_tokens_per_batch=99, temperature=1.0)
    assert (whole.num_rollouts, whole.num_loss_tokens) == (3, 6)


def test_a_group_whose_rollouts_are_all_masked_is_dropped() -> None:
    cut = tuple(make_rollout(finish_reason="length", sample_index=index) for index in range(2))
    group = make_group((0.2, 1.2), rollouts=cut)
    assert filter_groups([group], masks_truncated=False) == [group]
    assert filter_groups([group], masks_truncated=True) == []
    half = make_group((0.2, 1.2), rollouts=(cut[0], make_rollout(sample_index=1)))
    assert len(filter_groups([half], masks_truncated=True)) == 1
