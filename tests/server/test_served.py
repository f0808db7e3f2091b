"""What is served when a run goes away."""

import asyncio

import pytest
import torch

from podium.model.handoff import publish
from podium.model.load import load_policy
from podium.server import served as served_module
from podium.server.served import Served
from podium.settings.sections import Model

IDS = [1, 5, 9, 11]


def test_a_server_goes_back_to_its_own_weights_once_answers_have_ended_that_took_too_long(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_module, "RESTORE_PAUSE_S", 0.01)
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": {"r": 4}}), seed=0)
    moved = [(name, tensor + 0.1 * torch.ones_like(tensor)) for name, tensor in policy.named_weights()]
    folder = publish(served.root, policy, moved, 1)
    tries = 0

    async def run() -> None:
        nonlocal tries
        own = await served.score(IDS)
        served.claims.take("mine", "run")
        await served.reload(folder.name, 1, in_flight=False, run="mine")
        served.gate._drain_s = 0.02
        restore = served._restore

        async def counted(run: str) -> None:
            nonlocal tries
            tries += 1
            await restore(run)

        monkeypatch.setattr(served, "_restore", counted)
        async with asyncio.timeout(60):
            async with served.gate.answering():
                served.release("mine")
                while tries < 3:  # each gives up on the answer that is still being written
                    await asyncio.sleep(0.01)
                assert (served.run, served.version) == ("mine", 1)
            while served.run is not None:
                await asyncio.sleep(0.01)
        assert await served.score(IDS) == own | {"policy_version": 0}

    asyncio.run(run())
