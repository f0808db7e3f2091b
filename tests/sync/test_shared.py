import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from podium.errors import ParityError
from podium.sync import Delivery, Noise
from podium.sync.shared import Shared
from tests.fakes import FakeEngine


class ScoringTrainer:
    """Only what a sync asks of a trainer."""

    def __init__(self, logprob: float) -> None:
        self._logprob = logprob

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return [self._logprob] * (len(token_ids) - 1)

    def weights(self):
        return iter(())


def an_engine() -> FakeEngine:
    """Scores −1 everywhere, whatever it is given."""
    engine = FakeEngine(lambda request: ((1,), (0.0,)))
    engine.policy_version = None
    return engine


def a_sync(engine: FakeEngine, logprob: float) -> Shared:
    trainer: Any = ScoringTrainer(logprob)
    policy: Any = None
    return Shared(Delivery(trainer, engine, policy, [1, 2, 3], Noise("float32"), Path()))


def test_a_push_loads_and_proves() -> None:
    engine = an_engine()
    asyncio.run(a_sync(engine, -1.00005).push(4))
    assert engine.loaded == [4]


def test_nothing_moves_when_the_version_did_not() -> None:
    engine = an_engine()
    sync = a_sync(engine, -1.0)
    asyncio.run(sync.push(4))
    asyncio.run(sync.push(4))
    assert engine.loaded == [4]


@pytest.mark.parametrize("logprob", [-1.001, float("nan")])
def test_an_engine_with_other_weights_is_named(logprob: float) -> None:
    with pytest.raises(ParityError, match=r"FakeEngine does not sample from the trained weights.*version 4"):
        asyncio.run(a_sync(an_engine(), logprob).push(4))


def test_an_engine_that_keeps_its_version_is_named() -> None:
    class Forgetful(FakeEngine):
        async def load_weights(self, weights, version):
            pass

    engine = Forgetful(lambda request: ((1,), (0.0,)))
    engine.policy_version = 3
    with pytest.raises(ParityError, match="holds policy version 3 after version 4 was pushed"):
        asyncio.run(a_sync(engine, -1.0).push(4))
