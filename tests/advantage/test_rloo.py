import pytest

from podium.advantage.rloo import rloo


def test_each_reward_is_measured_against_the_mean_of_the_others() -> None:
    # 1 − (0 + 0.5)/2 = 0.75;  0 − (1 + 0.5)/2 = −0.75;  0.5 − (1 + 0)/2 = 0
    assert rloo([1.0, 0.0, 0.5]) == pytest.approx([0.75, -0.75, 0.0])


def test_it_sums_to_zero() -> None:
    assert sum(rloo([0.3, 1.2, 0.0, 0.7])) == pytest.approx(0, abs=1e-12)
