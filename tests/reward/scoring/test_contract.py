import asyncio
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import podium
from podium.errors import RewardContractError
from podium.reward.exact import exact
from podium.reward.scoring.stage import NamedReward, Scoring, bound_reward, check_value, declared_range
from podium.reward.scoring.verifiers import checks_answer, declare_range
from tests.builders import make_group, make_prompt


class Level(IntEnum):
    HIGH = 1


@declare_range(-1.0, 2.0)
def ranged(prompt: Any, rollout: Any) -> None:
    """Only its range matters here."""


BAD = [
    True,
    False,
    "1",
    "",
    "1.0",
    b"1",
    [1.0],
    (1.0,),
    {"reward": 1.0},
    {1.0},
    object(),
    float,
    1 + 0j,
    Decimal("1"),
    Fraction(1, 2),
    np.float32(1),
    np.int64(1),
    np.array(1.0),
    np.bool_(True),
    torch.tensor(1.0),
    (1.0 for _ in range(1)),
    float("nan"),
    float("inf"),
    float("-inf"),
    np.float64("nan"),
    10**400,
    2.1,
    -1.1,
    3,
]


@pytest.mark.parametrize("bad", BAD, ids=lambda value: f"{type(value).__name__} {value!r:.20}")
def test_a_bad_value_stops_the_run_and_the_message_names_the_reward_the_row_and_the_value(bad: Any) -> None:
    named = NamedReward("mine", declare_range(-1.0, 2.0)(lambda prompt, rollout: bad))
    group = make_group((0.0,), prompt=make_prompt(17, source="file"))
    with pytest.raises(RewardContractError) as caught:
        asyncio.run(Scoring({"mine": named}, ["mine"], 1).score(group))
    message = str(caught.value)
    assert message.startswith("reward 'mine' on prompt 17 (file) returned ")
    shown = str(bad) if isinstance(bad, (int, float)) and not isinstance(bad, bool) else f"{bad!r:.80}"
    assert shown in message


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        ("1", "of type str; return a float, or None to abstain"),
        (float("nan"), "return a finite number, or None to abstain"),
        (3.0, "outside its declared range [-1.0, 2.0]"),
    ],
)
def test_the_message_says_what_is_allowed(bad: Any, remedy: str) -> None:
    with pytest.raises(RewardContractError) as caught:
        check_value("mine", ranged, bad, make_prompt())
    assert str(caught.value).endswith(remedy)


@pytest.mark.parametrize(
    ("good", "expected"),
    [(0, 0.0), (1, 1.0), (-1, -1.0), (0.25, 0.25), (2.0, 2.0), (np.float64(0.5), 0.5), (Level.HIGH, 1.0), (None, None)],
)
def test_finite_numbers_within_the_range_and_none_are_taken(good: Any, expected: float | None) -> None:
    value = check_value("mine", ranged, good, make_prompt())
    assert value == expected
    assert value is None or type(value) is float


def test_the_ends_of_the_range_forgive_a_rounding_error() -> None:
    assert check_value("mine", ranged, 2.0 + 1e-12, make_prompt()) == pytest.approx(2.0, abs=1e-9)


def test_without_a_declared_range_every_number_is_taken_whose_square_a_float_can_hold() -> None:
    assert check_value("mine", lambda: None, -1e30, make_prompt()) == -1e30
    with pytest.raises(RewardContractError, match=r"return a number from -1e\+30 to 1e\+30"):
        check_value("mine", lambda: None, -1e31, make_prompt())
    assert declared_range(lambda: None) == (float("-inf"), float("inf"))


def test_users_find_the_decorator_in_the_package() -> None:
    assert podium.declare_range is declare_range
    assert podium.checks_answer is checks_answer


def test_a_reward_keeps_its_range_and_its_check_when_its_options_are_bound() -> None:
    check = exact.check_answer  # type: ignore[attr-defined]
    assert bound_reward(exact, {}).check_answer is check
    assert declared_range(bound_reward(exact, {})) == (0.0, 1.0)
