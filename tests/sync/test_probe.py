"""The parity probe: what rounding does to unlikely tokens is allowed, other weights are not."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from podium.errors import ParityError
from podium.sync._probe import TOLERANCE, check_parity


def check(expected: list[float], found: list[float], precision: str) -> None:
    async def score(logprobs: list[float]) -> list[float]:
        return logprobs

    trainer: Any = SimpleNamespace(score=lambda probe: score(expected))
    engine: Any = SimpleNamespace(score=lambda probe: score(found), policy_version=1)
    asyncio.run(check_parity(trainer, engine, [1, 2, 3], 1, TOLERANCE[precision]))


@pytest.mark.parametrize(("mean", "allowed"), [(0.5, 0.05), (4.0, 0.2), (18.0, 0.5)])
def test_a_probe_that_has_become_unlikely_may_be_rounded(mean: float, allowed: float) -> None:
    """As seen in bfloat16 after 100 steps that never trained the probe; never by more than ten times as much."""
    expected = [-0.5 * mean, -1.5 * mean]
    check(expected, [logprob + 0.98 * allowed for logprob in expected], "bfloat16")
    with pytest.raises(ParityError, match=f"{allowed:g} is allowed"):
        check(expected, [logprob - 1.02 * allowed for logprob in expected], "bfloat16")


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ([-0.5, -0.5], [-0.5, -0.7]),
        ([-14.0, -22.0], [-3.0, -4.0]),
        ([-14.0, -22.0], [-16.0, -24.0]),
        ([-1.0, float("-inf")], [-1.0, -1.0]),
        ([-1.0, float("nan")], [-1.0, -1.0]),
    ],
)
def test_other_weights_are_told(precision: str, expected: list[float], found: list[float]) -> None:
    with pytest.raises(ParityError, match="does not sample from the trained weights"):
        check(expected, found, precision)
