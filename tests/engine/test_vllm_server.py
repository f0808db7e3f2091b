"""The client of an engine server: handshake, claims, answers that cannot be right, servers that die or fall silent."""

import asyncio
import copy
import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.engine.vllm_server import CALL_REQUESTS, VllmServer, calls_of
from podium.errors import EngineError, InputError
from podium.model.chat import tokenizer_fingerprint
from podium.model.handoff import publish, remove_published
from podium.model.load import Policy, load_policy
from podium.records import Answer, PrefixGroup, Request, Sampling, ids_digest
from podium.settings.sections import Model
from tests.server.serving import Running, serving

IDS = (1, 5, 9, 11)
SAMPLING = Sampling(max_new_tokens=4)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(Model.model_validate({"device": "cpu", "lora": {"r": 4}}), seed=0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), "--model.device=cpu", tcp=True) as running:
        yield running


def made(policy: Policy, server: Running, **others: Any) -> VllmServer:
    return VllmServer(policy, **(server.engine_options | {"token_file": server.token_file} | others))


def asked(engine: VllmServer, *requests: Request) -> list[Answer]:
    async def run() -> list[Answer]:
        group = PrefixGroup("train/3", 2)
        two = [Request(IDS, SAMPLING, seed, group) for seed in (1, 2)]
        return await asyncio.gather(*(engine.generate(request) for request in requests or two))

    return asyncio.run(run())


def load(engine: VllmServer, policy: Policy, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
    """Through a folder, as a sync channel does."""
    assert engine.traits.weights_root is not None
    folder = publish(engine.traits.weights_root, policy, weights, version)
    asyncio.run(engine.load_folder(folder, version))
    remove_published(folder)


def retold(policy: Policy, change: str) -> Policy:
    """The policy with a tokenizer that differs in one thing."""
    tokenizer = copy.deepcopy(policy.tokenizer)
    if change == "chat template":
        tokenizer.chat_template += " "
    elif change == "special ids":
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    else:
        tokenizer.add_tokens(["<more>"])
    return replace(policy, tokenizer=tokenizer)


@pytest.mark.parametrize("change", ["chat template", "special ids", "vocabulary"])
def test_another_tokenizer_is_refused_at_the_handshake(change: str, policy: Policy, server: Running) -> None:
    with pytest.raises(InputError, match=f"serves another model.*{change}"):
        made(retold(policy, change), server)


def test_a_wrong_token_and_none_are_refused(
    policy: Policy, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("not-the-right-token")
    for token_file in (tmp_path / "token", None):
        with pytest.raises(InputError, match="does not accept the token"):
            made(policy, server, token_file=token_file)
    monkeypatch.setenv("THE_TOKEN", server.token)
    made(policy, server, token_file=None, token_env="THE_TOKEN")
    with pytest.raises(InputError, match=r"engine\.token_env names no"):
        made(policy, server, token_file=None, token_env="NOT_THERE")


def test_a_claim_holds_others_off_and_ends_with_the_run(policy: Policy, server: Running) -> None:
    """Scope run: afterwards the server is back at its own weights."""
    with server.client() as http, closing(made(policy, server)) as mine:
        load(mine, policy, policy.named_weights(), 0)
        before = asked(mine)
        asyncio.run(mine.claim("mine", "run"))
        moved = [(name, tensor + 0.1) for name, tensor in policy.named_weights()]
        load(mine, policy, moved, 1)
        assert asked(mine)[0].logprobs != before[0].logprobs
        with closing(made(policy, server)) as other:
            with pytest.raises(InputError, match="claimed by run 'mine'"):
                asyncio.run(other.claim("other", "run"))
            with pytest.raises(EngineError, match="claimed by run 'mine'"):
                load(other, policy, moved, 2)
        with pytest.raises(InputError, match="scope 'run', not 'engine'"):
            asyncio.run(mine.claim("mine", "engine"))
        assert http.get("/info").json()["run"] == "mine"
        mine.close()
        deadline = time.monotonic() + 30
        while http.get("/info").json()["run"] is not None and time.monotonic() < deadline:
            time.sleep(0.05)
        info = http.get("/info").json()
        assert (info["run"], info["policy_version"], info["claimed_by"]) == (None, 0, None)
        assert asked(mine)[0].logprobs == before[0].logprobs


def test_weights_of_somebody_else_are_noticed(policy: Policy, server: Running) -> None:
    """As after a restart of the server in the middle of a run."""
    with closing(made(policy, server)) as mine:
        asyncio.run(mine.claim("mine", "run"))
        load(mine, policy, policy.named_weights(), 1)
        with server.client() as http:
            assert http.post("/release", json={"run": "mine"}).status_code == 200
        with pytest.raises(EngineError, match="'mine' has no claim"):
            asked(mine)


def test_a_prompt_that_is_too_long_is_the_inputs_fault(policy: Policy, server: Running) -> None:
    with closing(made(policy, server)) as engine, pytest.raises(InputError, match="request train/7 has 600 tokens"):
        asked(engine, Request((5,) * 600, SAMPLING, 1, PrefixGroup("train/7", 1)))


def test_a_call_is_cut_to_what_a_server_takes() -> None:
    """A prompt counts once, however many of its requests are in a call."""
    long = [Request((k,) * 90_000, SAMPLING, seed) for k in range(5) for seed in range(10)]
    assert [len(call) for call in calls_of(long)] == [20, 20, 10]
    many = [Request((1,), SAMPLING, seed) for seed in range(2 * CALL_REQUESTS + 1)]
    assert [len(call) for call in calls_of(many)] == [CALL_REQUESTS, CALL_REQUESTS, 1]
    assert list(calls_of([])) == []


def test_requests_of_one_turn_travel_together_each_with_its_own_sampling(policy: Policy, server: Running) -> None:
    """Over the largest body that a client sends, and with listeners."""
    stops = tuple(range(0, 100, 10))
    requests = [
        Request(IDS[: 1 + k % 3], Sampling(1 + k % 5, 1.0 + k % 2, stop_ids=stops), k, PrefixGroup(f"train/{k % 3}", 9))
        for k in range(CALL_REQUESTS + 10)
    ]
    heard: dict[int, list[int]] = {k: [] for k in range(len(requests))}
    calls: list[int] = []

    async def run(engine: VllmServer) -> list[Answer]:
        stream = engine._connection.stream

        def counted(path: str, body: Any) -> Any:
            calls.append(len(body["requests"]))
            return stream(path, body)

        engine._connection.stream = counted  # type: ignore[method-assign]
        return await asyncio.gather(*(engine.generate(r, heard[k].extend) for k, r in enumerate(requests)))

    with closing(made(policy, server)) as engine:
        answers = asyncio.run(run(engine))
    assert calls == [CALL_REQUESTS, 10]
    assert all(len(a.token_ids) <= r.sampling.max_new_tokens for a, r in zip(answers, requests, strict=True))
    assert {len(answer.token_ids) for answer in answers} == {1, 2, 3, 4, 5}
    assert [tuple(heard[k]) for k in heard] == [answer.token_ids for answer in answers]


def test_what_is_cancelled_here_is_cancelled_at_the_server(policy: Policy, server: Running) -> None:
    async def run(engine: VllmServer) -> None:
        long = [Request(IDS, Sampling(max_new_tokens=400), seed) for seed in range(200)]
        writing = [asyncio.ensure_future(engine.generate(request)) for request in long]
        with server.client() as http:
            while "podium_running 1.0" not in http.get("/metrics").text:
                await asyncio.sleep(0.01)
            for each in writing:
                each.cancel()
            await asyncio.gather(*writing, return_exceptions=True)
            async with asyncio.timeout(20):
                while "podium_running 0.0" not in http.get("/metrics").text:
                    await asyncio.sleep(0.05)

    with closing(made(policy, server)) as engine:
        asyncio.run(run(engine))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_is_an_error_with_its_name_in_time(
    how: signal.Signals, policy: Policy, tmp_path: Path
) -> None:
    with serving(tmp_path, "--model.device=cpu") as server, closing(made(policy, server, silence_s=4)) as engine:

        async def run() -> None:
            lengths = [1, *[400] * 999]
            requests = [Request(IDS, Sampling(max_new_tokens=n), seed) for seed, n in enumerate(lengths)]
            writing = [asyncio.ensure_future(engine.generate(request)) for request in requests]
            await writing[0]
            os.kill(server.process.pid, how)
            await asyncio.gather(*writing)

        began = time.monotonic()
        with pytest.raises(EngineError, match=f"engine {server.url}"):
            asyncio.run(run())
        assert time.monotonic() - began < 60
        if how == signal.SIGKILL:
            with pytest.raises(EngineError, match=f"engine {server.url} cannot be reached"):
                asyncio.run(engine.score(IDS))


ANSWER = {
    "token_ids": [5, 6],
    "logprobs": [-0.5, -0.5],
    "finish_reason": "length",
    "policy_versions": [0, 0],
    "num_pauses": 0,
    "digest": ids_digest((5, 6)),
}


def line(place: int = 0, **changes: Any) -> dict[str, Any]:
    return {"place": place, "answer": ANSWER | changes, "run": None}


WRONG: dict[str, tuple[list[Any], str]] = {
    "NaN": ([line(logprobs=[-0.5, float("nan")])], "no numbers"),
    "infinite": ([line(logprobs=[-0.5, float("-inf")])], "no numbers"),
    "none": ([line(logprobs=[-0.5, None])], "answers nothing"),
    "too few logprobs": ([line(logprobs=[-0.5])], "wrong counts"),
    "an id too large": ([line(token_ids=[5, 10**6])], "outside the vocabulary"),
    "an id below 0": ([line(token_ids=[5, -1])], "outside the vocabulary"),
    "ids as text": ([line(token_ids=["5", "6"])], "answers nothing"),
    "aborted": ([line(finish_reason="abort")], "no known end"),
    "another end": ([line(finish_reason="tired")], "answers nothing"),
    "another place": ([line(place=4)], "answers nothing"),
    "no place": ([{"answer": ANSWER, "run": None}], "answers nothing"),
    "the same twice": ([line(), line()], "answers nothing"),
    "an error": ([{"error": "the engine failed"}], "the engine failed"),
    "no JSON": (["<html>"], "did not send JSON"),
    "nothing": ([], "left out 2 of 2"),
    "one of two": ([line()], "left out 1 of 2"),
    "cut in a line": (["CUT"], "broke off"),
}


@contextmanager
def lying(policy: Policy, lines: list[Any], untold: str = "") -> Iterator[str]:
    """A server that shakes hands properly, but for what it leaves untold, and then sends these lines."""
    info = {
        "vocabulary": policy.vocabulary,
        "tokenizer": tokenizer_fingerprint(policy.tokenizer),
        "dtype": "float32",
        "max_context_tokens": 512,
        "weights_root": "/nowhere",
        "transfer_ranks": 0,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(json.dumps({key: value for key, value in info.items() if key != untold}).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
            self.answer("\n".join(text).encode(), len("\n".join(text)) + 50 * (text == ["CUT"]))

        def answer(self, body: bytes, length: int | None = None) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body) if length is None else length))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join(10)


@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_that_cannot_be_right_is_the_engines_failure(wrong: str, policy: Policy) -> None:
    lines, told = WRONG[wrong]
    with lying(policy, lines) as url, pytest.raises(EngineError, match=told) as caught:
        asked(VllmServer(policy, url=url))
    assert url in str(caught.value)


def test_a_right_answer_is_taken(policy: Policy) -> None:
    """So that the failures above are what they say."""
    with lying(policy, [line(1), line()]) as url:
        answers = asked(VllmServer(policy, url=url))
    assert answers == [Answer((5, 6), (-0.5, -0.5), "length", (0, 0))] * 2


@pytest.mark.parametrize("untold", ["vocabulary", "tokenizer", "dtype", "weights_root", "transfer_ranks"])
def test_a_server_that_does_not_say_what_it_is_is_none_of_ours(untold: str, policy: Policy) -> None:
    with lying(policy, [], untold) as url, pytest.raises(EngineError, match="is no `podium serve`"):
        VllmServer(policy, url=url)


def test_a_score_by_other_weights_than_those_it_confirmed_is_the_engines_failure(policy: Policy) -> None:
    scores = {"logprobs": [-0.5] * 3, "policy_version": 4, "run": None}
    with lying(policy, [scores]) as url:
        engine = VllmServer(policy, url=url)
        engine.policy_version = 4
        assert asyncio.run(engine.score(IDS)) == [-0.5] * 3
        engine.policy_version = 5
        with pytest.raises(EngineError, match="scored by version 4, it had confirmed 5"):
            asyncio.run(engine.score(IDS))


def test_nobody_there_is_told_at_once(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot be reached"):
        VllmServer(policy, url=f"unix:{tmp_path / 'nothing'}")
    with pytest.raises(InputError, match=r"engine\.url"):
        VllmServer(policy, url="ftp://host")
