"""Many clients while the weights change: each answer is of one version, and no client is failed but by a 503."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from podium.model.load import load_policy
from podium.settings.sections import Model
from tests.server.serving import Running
from tests.server.test_weights import published

CLIENTS, RELOADS = 1000, 6


def test_1000_clients_during_reloads_get_one_version_each(server: Running, tmp_path: Path) -> None:
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": {"r": 4}}), seed=0)
    first = 100
    folders = [published(server.root, policy, first + k, seed=k, scale=0.3) for k in range(RELOADS)]
    by_version: dict[int, set[str]] = {}
    statuses: Counter[Any] = Counter()
    asked = [{"key": k, "prompt_token_ids": [1, 5, 9], "seeds": [k, 9]} for k in range(2)]
    stops = list(range(0, 100, 10))  # so many that rollouts end at different times
    body = {"requests": asked, "max_tokens": 12, "temperature": 1.5, "stop_token_ids": stops}

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        await asyncio.sleep(random.Random(number).random() * 3)
        if number % 10 == 0:  # one who goes away in the middle
            try:
                await client.post("/generate", json=body, timeout=httpx.Timeout(240, read=0.05))
            except httpx.TimeoutException:
                statuses["gone"] += 1
            return
        response = await client.post("/generate", json=body)
        statuses[response.status_code] += 1
        if response.status_code == 200:
            answers = response.json()["answers"]
            [version] = {each for answer in answers for pair in answer["policy_versions"] for each in pair}
            assert all(version == answer["policy_version"] for answer in answers)
            by_version.setdefault(version, set()).add(str([answer["token_ids"] for answer in answers]))

    async def reload(client: httpx.AsyncClient) -> None:
        for k, folder in enumerate(folders):
            response = await client.post("/reload_weights", json={"id": folder.name, "version": first + k})
            assert response.status_code == 200, response.text
            await asyncio.sleep(0.3)

    async def run() -> None:
        headers = {"authorization": f"Bearer {server.token}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=240, limits=limits) as client:
            response = await client.post("/reload_weights", json={"id": folders[0].name, "version": first})
            assert response.status_code == 200
            await asyncio.gather(reload(client), *(ask(client, number) for number in range(CLIENTS)))
            await asyncio.sleep(0.5)
            metrics = (await client.get("/metrics")).text
            assert "podium_running 0.0" in metrics  # whoever went away left the queue
            assert "podium_waiting 0.0" in metrics

    asyncio.run(run())
    assert set(statuses) <= {200, 503, "gone"}
    assert statuses[200] >= CLIENTS // 2
    assert len(by_version) >= 2  # the reloads did fall among the answers
    assert all(
        len(ids) == 1 for ids in by_version.values()
    )  # same seeds, same weights, same answer, whatever the batch


def test_in_flight_weights_arrive_in_the_middle_of_answers(server: Running) -> None:
    """Asked for, a swap does not wait: some rollouts begin under one version and end under the next."""
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": {"r": 4}}), seed=0)
    old, new = (published(server.root, policy, version, seed=version, scale=0.1) for version in (200, 201))
    asked = [{"key": k, "prompt_token_ids": [1, 5, 9], "seeds": [k, k + 100]} for k in range(40)]
    body = {"requests": asked, "max_tokens": 400, "temperature": 1.5}

    async def run() -> list[list[int]]:
        headers = {"authorization": f"Bearer {server.token}"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=120) as client:
            first = await client.post("/reload_weights", json={"id": old.name, "version": 200})
            assert first.status_code == 200
            answers = asyncio.create_task(client.post("/generate", json=body))
            while "podium_running 0.0" in (await client.get("/metrics")).text:
                assert not answers.done()
            second = await client.post("/reload_weights", json={"id": new.name, "version": 201, "in_flight": True})
            assert second.status_code == 200
            lines = (await answers).json()["answers"]
            return [pair for line in lines for pair in line["policy_versions"]]

    pairs = asyncio.run(run())
    assert [200, 201] in pairs
    assert all(first <= last for first, last in pairs)
