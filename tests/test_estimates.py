"""pass@k, intervals and comparisons: by hand, and against scipy."""

import itertools
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from podium.evaluation import RESAMPLES, bootstrap, compare, mcnemar, of_mean, of_share, pass_at_k, wilson


def test_pass_at_k_by_hand() -> None:
    # 4 rollouts, 1 correct. Of the 6 pairs 3 hold the correct one. Of the 4 triples 3 do.
    assert pass_at_k(4, 1, 1) == pytest.approx(1 / 4, abs=1e-12)
    assert pass_at_k(4, 1, 2) == pytest.approx(3 / 6, abs=1e-12)
    assert pass_at_k(4, 1, 3) == pytest.approx(3 / 4, abs=1e-12)
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 3, 2) == 1.0  # only one is wrong: every pair holds a correct one


@pytest.mark.parametrize(("n", "c", "k"), [(5, 2, 2), (6, 1, 3), (7, 4, 2), (8, 3, 8)])
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_correct_one(n: int, c: int, k: int) -> None:
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(fmean(any(draw) for draw in draws), abs=1e-12)


def test_pass_at_k_of_many_rollouts_does_not_overflow() -> None:
    assert 0.99 < pass_at_k(5000, 100, 1000) <= 1.0


@pytest.mark.parametrize(("right", "count"), [(0, 10), (1, 10), (7, 10), (10, 10), (277, 500), (499, 500), (1, 1)])
def test_wilsons_interval_is_scipys(right: int, count: int) -> None:
    expected = stats.binomtest(right, count).proportion_ci(confidence_level=0.95, method="wilson")
    assert wilson(right, count) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_wilsons_interval_by_hand() -> None:
    # p = 0.5, n = 4, z² = 3.8414588206941236: centre (0.5 + z²/8) / (1 + z²/4) = 0.5 exactly;
    # reach sqrt(z²/16 + (z²)²/64) / (1 + z²/4) = 0.34996109...
    z2 = 3.8414588206941236
    reach = (z2 / 16 + z2 * z2 / 64) ** 0.5 / (1 + z2 / 4)
    assert wilson(2, 4) == pytest.approx((0.5 - reach, 0.5 + reach), abs=1e-12)


@pytest.mark.parametrize("size", [2, 30, 700])
def test_the_bootstrap_is_scipys(size: int) -> None:
    values = np.random.default_rng(5).normal(size=size).tolist()
    options = {"n_resamples": RESAMPLES, "method": "percentile", "confidence_level": 0.95}
    expected = stats.bootstrap((values,), np.mean, rng=np.random.default_rng(0), **options).confidence_interval
    assert bootstrap(values) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_the_same_values_have_the_same_interval_and_other_seeds_another() -> None:
    values = [0.0, 0.25, 1.0, 0.5, 0.75, 0.3]
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values) != bootstrap(values, seed=1)


def test_drawing_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(1).uniform(size=50).tolist()
    whole = bootstrap(values)
    monkeypatch.setattr("podium.evaluation.CHUNK", 170)
    assert bootstrap(values) == pytest.approx(whole, abs=1e-12)


def test_intervals_hold_the_truth_about_95_times_in_100() -> None:
    random = np.random.default_rng(0)
    truth, rounds = 0.3, 400
    samples = (random.random(60) < truth for _ in range(rounds))
    held = [
        estimate.low <= truth <= estimate.high for estimate in (of_share(s.astype(float).tolist()) for s in samples)
    ]
    assert 0.92 <= fmean(held) <= 0.98


def test_a_share_is_wilsons_where_prompts_are_right_or_wrong_and_the_bootstraps_where_they_are_in_between() -> None:
    assert (of_share([1.0, 0.0, 1.0]).low, of_share([1.0, 0.0, 1.0]).high) == wilson(2, 3)
    between = [1.0, 0.5, 0.25]
    assert (of_share(between).low, of_share(between).high) == bootstrap(between)


def test_ten_prompts_all_solved_are_no_certainty() -> None:
    assert of_share([1.0] * 10).low == pytest.approx(0.7224672001371107, abs=1e-9)  # 1 / (1 + z²/10)
    assert of_share([0.5] * 10).low < 0.3


def test_a_mean_has_its_bootstrap() -> None:
    estimate = of_mean([1.0, 2.0, 6.0])
    assert estimate.value == 3.0
    assert (estimate.low, estimate.high) == bootstrap([1.0, 2.0, 6.0])


@pytest.mark.parametrize(("one", "other"), [(0, 0), (1, 0), (5, 0), (6, 0), (3, 9), (9, 3), (7, 7), (300, 240)])
def test_mcnemars_test_is_the_binomial_test_of_the_prompts_on_which_they_differ(one: int, other: int) -> None:
    expected = stats.binomtest(one, one + other, 0.5).pvalue if one + other else 1.0
    assert mcnemar(one, other) == pytest.approx(expected, abs=1e-9)


def test_mcnemar_by_hand() -> None:
    assert mcnemar(5, 0) == 2 / 32  # five heads or five tails
    assert mcnemar(6, 0) == 2 / 64


def test_a_comparison_goes_prompt_by_prompt() -> None:
    first, second = [1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 1.0]
    made = compare(first, second)
    assert made.difference.value == 0.25
    assert (made.only_first, made.only_second, made.num_prompts) == (2, 1, 4)
    assert made.p_value == 1.0  # of three, two against one: (1 + 3) / 8 · 2
    assert not made.is_significant


def test_pairs_tell_apart_what_two_intervals_would_not() -> None:
    first = [1.0] * 60 + [0.0] * 40
    second = [1.0] * 50 + [0.0] * 50
    assert of_share(first).low < of_share(second).high  # the intervals overlap
    made = compare(first, second)
    assert made.p_value == pytest.approx(2 / 2**10)  # ten prompts only the first solves, none the other way
    assert made.is_significant


def test_values_between_are_told_apart_by_the_interval_of_their_differences() -> None:
    second = [0.1, 0.4, 0.2, 0.6, 0.3, 0.5]
    made = compare([value + 0.1 + 0.01 * i for i, value in enumerate(second)], second)
    assert made.p_value is None
    assert made.difference.low > 0
    assert made.is_significant
    assert not compare([0.5, 0.1, 0.5, 0.1], [0.1, 0.5, 0.1, 0.5]).is_significant
