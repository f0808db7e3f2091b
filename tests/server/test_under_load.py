"""Many clients while the weights change: each answer is of one version, and no client is failed but by a 503."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from podium.model.load import load_policy
from podium.settings.sections import Model
from tests.server.serving import Running
from tests.server.test_weights import published

CLIENTS, RELOADS, WAVE = 1000, 6, 80
"""Waves of `WAVE` clients ask after each reload; the others whenever they like."""
PROMPTS = [[1, 5, 9], [1, 6, 8, 9], [1, 7], [1, 9, 4, 3, 8]]

Answer = list[dict[str, Any]]


def are_same(one: Answer, other: Answer) -> bool:
    """Greedy answers to the same prompts by the same weights. Rounding depends on the batch, and so on the clock: it
    may decide between two tokens that are equally likely, after which the answers differ."""
    return all(map(_is_same, one, other))


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    [ids], [other_ids] = one["token_ids"], other["token_ids"]
    for k, (logprob, other_logprob) in enumerate(zip(one["logprobs"][0], other["logprobs"][0], strict=False)):
        if abs(logprob - other_logprob) > 1e-3:
            return False
        if ids[k] != other_ids[k]:
            return True
    return len(ids) == len(other_ids)


def check_answers(by_version: dict[int, list[Answer]]) -> None:
    """Those of a version are the same, whatever the batch, and those of another version are others."""
    firsts = {version: answers[0] for version, answers in by_version.items()}
    for version, answers in by_version.items():
        assert all(are_same(firsts[version], answer) for answer in answers)
        assert not any(are_same(firsts[version], first) for other, first in firsts.items() if other != version)


def test_1000_clients_during_reloads_get_one_version_each(server: Running, tmp_path: Path) -> None:
    """Nothing here depends on the clock: a reload begins when half of the wave before it is answered, so each version
    has answers, and the other half, and the crowd, ask while the weights change. Not all connections are open at the
    same time: on a busy machine this event loop would be so late that the server gives up waiting for a header."""
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": {"r": 4}}), seed=0)
    first = 100
    folders = [published(server.root, policy, first + k, seed=k, scale=0.3) for k in range(RELOADS)]
    by_version: dict[int, list[Answer]] = {}
    statuses: Counter[Any] = Counter()
    asked = [{"key": k, "prompt_token_ids": prompt, "seeds": [k]} for k, prompt in enumerate(PROMPTS)]
    stops = list(range(0, 100, 10))  # so many that rollouts end at different times
    body = {"requests": asked, "max_tokens": 12, "temperature": 0.0, "stop_token_ids": stops}

    async def ask(client: httpx.AsyncClient) -> None:
        response = await client.post("/generate", json=body)
        statuses[response.status_code] += 1
        if response.status_code == 200:
            answers = sorted(response.json()["answers"], key=lambda answer: answer["key"])
            [version] = {each for answer in answers for pair in answer["policy_versions"] for each in pair}
            assert all(version == answer["policy_version"] for answer in answers)
            by_version.setdefault(version, []).append(answers)

    async def ask_and_leave(client: httpx.AsyncClient) -> None:
        asking = asyncio.create_task(ask(client))
        await asyncio.wait({asking}, timeout=0.05)
        statuses["gone"] += asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking

    async def ask_some_time(client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(random.Random(number).random() * 3)
        await (ask(client) if number % 5 else ask_and_leave(client))

    async def reload_with_waves(client: httpx.AsyncClient) -> None:
        waves: list[asyncio.Task[None]] = []
        for k, folder in enumerate(folders):
            response = await client.post("/reload_weights", json={"id": folder.name, "version": first + k})
            assert response.status_code == 200, response.text
            wave = [asyncio.create_task(ask(client)) for _ in range(WAVE)]
            for answered in islice(asyncio.as_completed(wave), WAVE // 2):
                await answered
            waves += wave
        await asyncio.gather(*waves)

    async def run() -> None:
        headers = {"authorization": f"Bearer {server.token}"}
        limits = httpx.Limits(max_connections=300)  # more than the engine works on at a time
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=600, limits=limits) as client:
            crowd = CLIENTS - RELOADS * WAVE
            response = await client.post("/reload_weights", json={"id": folders[0].name, "version": first})
            assert response.status_code == 200
            await asyncio.gather(reload_with_waves(client), *(ask_some_time(client, k) for k in range(crowd)))
            idle = {"podium_running 0.0", "podium_waiting 0.0"}
            while not idle <= set((await client.get("/metrics")).text.splitlines()):  # who went away leaves the queue
                await asyncio.sleep(0.05)

    asyncio.run(run())
    assert set(statuses) <= {200, 503, "gone"}
    assert statuses[200] >= CLIENTS // 2
    assert set(by_version) == set(range(first, first + RELOADS))
    check_answers(by_version)


def test_in_flight_weights_arrive_in_the_middle_of_answers(server: Running) -> None:
    """Asked for, a swap does not wait: some rollouts begin under one version and end under the next. On a busy machine
    all answers may be there before the new weights are; then the next weights get a chance."""
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": {"r": 4}}), seed=0)
    asked = [{"key": k, "prompt_token_ids": [1, 5, 9], "seeds": [k, k + 100]} for k in range(40)]
    body = {"requests": asked, "max_tokens": 400, "temperature": 1.5}

    async def reload(client: httpx.AsyncClient, version: int) -> None:
        folder = published(server.root, policy, version, seed=version, scale=0.1)
        weights = {"id": folder.name, "version": version, "in_flight": version > 200}
        assert (await client.post("/reload_weights", json=weights)).status_code == 200

    async def run() -> list[list[int]]:
        headers = {"authorization": f"Bearer {server.token}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=600) as client:
            await reload(client, 200)
            for version in range(201, 211):
                answers = asyncio.create_task(client.post("/generate", json=body))
                while "podium_running 0.0" in (await client.get("/metrics")).text and not answers.done():
                    pass
                await reload(client, version)
                pairs = [pair for line in (await answers).json()["answers"] for pair in line["policy_versions"]]
                if [version - 1, version] in pairs:
                    return pairs
            raise AssertionError(f"never in the middle of answers: {pairs}")

    assert all(first <= last for first, last in asyncio.run(run()))
