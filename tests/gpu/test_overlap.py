"""An engine with weights of its own writes on CUDA while the trainer trains."""

import asyncio
import time

import pytest
import torch

from podium.engine.inprocess import Inprocess
from podium.model.device_thread import SHARED
from podium.pack import pack
from podium.records import Request, Sampling
from tests.model.test_attention import a_model

from .test_decoding import policy_of, requests
from .test_training_step import a_trainer, groups_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler warns of its own parts
]

SAMPLING = Sampling(max_new_tokens=200, temperature=1.0)
Made = list[tuple]


async def written(engine: Inprocess, asked: list[Request]) -> Made:
    made = await asyncio.gather(*map(engine.generate, asked))
    return [(answer.token_ids, answer.logprobs) for answer in made]


def test_what_is_written_beside_training_is_what_would_be_written_alone() -> None:
    trainer = a_trainer(a_model("llama"))
    engine = Inprocess(trainer._policy, snapshot=True, compute_dtype=torch.bfloat16, overlaps=True)
    assert engine._thread is not SHARED
    batches = pack(groups_of(32), max_tokens_per_batch=256, temperature=1.0)
    asked = requests(64, SAMPLING)

    async def both() -> tuple[Made, Made, Made]:
        await engine.load_weights(trainer.weights(), 0)
        alone = await written(engine, asked)
        await trainer.step(batches)  # what compiles has compiled
        beside = asyncio.ensure_future(written(engine, asked))
        while not beside.done():
            assert (await trainer.step(batches)).updated
        await engine.load_weights(trainer.weights(), 1)
        return alone, beside.result(), await written(engine, asked)

    alone, beside, after = asyncio.run(both())
    engine.close()
    assert beside == alone, "training has changed what was written beside it"
    assert after != alone, "the weights after training have not reached the engine"


def test_a_long_call_of_the_trainer_does_not_keep_the_engine_waiting() -> None:
    policy = policy_of(a_model("llama"))
    engine = Inprocess(policy, snapshot=True, overlaps=True)
    asked = requests(16, SAMPLING)

    async def beside_a_call() -> bool:
        await engine.load_weights(policy.named_weights(), 0)
        await written(engine, asked)  # captures its steps, which waits for the trainer
        call = asyncio.ensure_future(SHARED.run(time.sleep, 10))
        await written(engine, asked)
        is_under_way = not call.done()
        await call
        return is_under_way

    assert asyncio.run(beside_a_call())
    engine.close()
