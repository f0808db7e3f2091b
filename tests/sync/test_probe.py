"""The parity probe: what rounding does to unlikely tokens is allowed, other weights are not."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from podium.errors import ParityError
from podium.model.evidence import Held
from podium.records import EngineTraits
from podium.sync import FLOOR, SAFETY, TOLERANCE, Noise, check_parity


def check(expected: list[float], found: list[float], noise: str | Noise, held: Held | None = None) -> None:
    """`held`: what the engine shows; the comparison finds its faults and nothing else."""

    async def score(logprobs: list[float]) -> list[float]:
        return logprobs

    async def show() -> Held | None:
        return held

    async def compare(shown: Held) -> str | None:
        return shown.faults[0] if shown.faults else None

    trainer: Any = SimpleNamespace(score=lambda probe: score(expected))
    traits = EngineTraits(channels=("disk",), shows_weights=held is not None)
    engine: Any = SimpleNamespace(traits=traits, score=lambda probe: score(found), held=show, policy_version=1)
    noise = Noise(noise) if isinstance(noise, str) else noise
    asyncio.run(check_parity(trainer, engine, [1, 2, 3], 1, noise, compare))


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


def test_what_the_engine_shows_counts_before_its_logprobs() -> None:
    """The same logprobs to the last digit, and yet other weights."""
    with pytest.raises(ParityError, match=r"does not sample from the trained weights.*version 1 its scale is another"):
        check([-1.0, -2.0], [-1.0, -2.0], "bfloat16", Held({}, faults=("its scale is another",)))


def test_the_tolerance_is_measured_while_the_weights_are_proven() -> None:
    """Two pushes with a gap of 0.002 in bfloat16: afterwards 8 · 0.002 = 0.016 per unit of unlikeliness is allowed, and
    the mean logprob of −2 makes it 0.032, where the precision alone would allow 0.1."""
    noise, expected = Noise("bfloat16"), [-1.0, -3.0]
    for _ in range(2):
        check(expected, [logprob - 0.004 for logprob in expected], noise, Held({}))
    check(expected, [logprob - 0.031 for logprob in expected], noise, Held({}))
    noise = Noise("bfloat16")
    check(expected, [logprob - 0.004 for logprob in expected], noise, Held({}))
    with pytest.raises(ParityError, match=r"0\.032 is allowed; it holds the trainer's weights, but computes something"):
        check(expected, [logprob - 0.033 for logprob in expected], noise, Held({}))


@pytest.mark.parametrize("precision", TOLERANCE)
def test_an_engine_without_any_noise_may_still_round(precision: str) -> None:
    noise = Noise(precision)
    check([-1.0], [-1.0], noise, Held({}))
    check([-1.0], [-1.0 - 0.99 * FLOOR[precision]], noise, Held({}))
    with pytest.raises(ParityError):
        check([-1.0], [-1.0 - 1.01 * SAFETY * FLOOR[precision]], noise, Held({}))


def test_what_is_not_proven_is_not_taken_for_noise() -> None:
    """An engine that shows nothing may be as far off as the precision allows, and stays so."""
    noise = Noise("bfloat16")
    check([-1.0], [-1.001], noise)
    check([-1.0], [-1.049], noise)
