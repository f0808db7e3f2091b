import pytest

from podium.advantage.build import assign_advantages
from podium.advantage.grpo import grpo
from podium.records import Group, Prompt


def test_population_std() -> None:
    # mean 0.5, population std √((4·0.25)/4) = 0.5, so ±0.5 / (0.5 + 1e-4) = ±0.99980004
    assert grpo([1.0, 0.0, 1.0, 0.0]) == pytest.approx([0.99980004, -0.99980004] * 2, abs=1e-8)


def test_sample_std_is_larger_by_the_root_of_n_over_n_minus_1() -> None:
    # sample std √(1/3) = 0.57735027, so 0.5 / 0.57735027 = 0.86602540
    assert grpo([1.0, 0.0, 1.0, 0.0], std="sample", eps=0.0) == pytest.approx([0.8660254, -0.8660254] * 2, abs=1e-7)


def test_without_std_the_difference_stays_as_it_is() -> None:
    # mean 0.4
    assert grpo([1.2, 0.0, 0.0], std="none") == pytest.approx([0.8, -0.4, -0.4], abs=1e-12)


def a_group(rewards: tuple[float | None, ...]) -> Group:
    return Group(Prompt(0, (1,)), rollouts=tuple([None] * len(rewards)), rewards=rewards)  # type: ignore[arg-type]


def test_advantage_is_exactly_zero_when_all_rewards_are_equal() -> None:
    # eight times 1.2 has a float32 deviation of 1e-7 and not 0; the rewards themselves are compared
    [group] = assign_advantages([a_group((1.2,) * 8)], grpo)
    assert group.advantages == (0.0,) * 8
    assert not group.has_signal


def test_a_rollout_without_reward_leaves_the_baseline() -> None:
    # the baseline is over 1 and 0 only: mean 0.5, std 0.5
    [group] = assign_advantages([a_group((1.0, None, 0.0))], lambda rewards: grpo(rewards, eps=0.0))
    assert group.advantages == pytest.approx((1.0, 0.0, -1.0))


def test_groups_do_not_mix() -> None:
    alone = [assign_advantages([a_group(rewards)], grpo)[0].advantages for rewards in ((1.0, 0.0), (5.0, 9.0))]
    together = [group.advantages for group in assign_advantages([a_group((1.0, 0.0)), a_group((5.0, 9.0))], grpo)]
    assert together == alone
