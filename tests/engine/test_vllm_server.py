"""The client of an engine server: handshake, claims, answers that cannot be right, servers that die or fall silent."""

import asyncio
import copy
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from podium.engine.vllm_server import CALL_ROLLOUTS, VllmServer, _parts
from podium.errors import EngineError, InputError
from podium.model.fingerprint import tokenizer_fingerprint
from podium.model.load import Policy, load_policy
from podium.records import Answer, Request, Sampling
from podium.sections import Model
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


def asked(engine: VllmServer, *requests: Request, sampling: Sampling = SAMPLING) -> list[Answer]:
    async def run() -> list[Answer]:
        return [answer async for answer in engine.generate(requests or [Request(3, IDS, (1, 2))], sampling)]

    return asyncio.run(run())


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
        asyncio.run(mine.load_weights(policy.named_weights(), 0))
        before = asked(mine)
        asyncio.run(mine.claim("mine", "run"))
        moved = [(name, tensor + 0.1) for name, tensor in policy.named_weights()]
        asyncio.run(mine.load_weights(moved, 1))
        assert asked(mine)[0].logprobs != before[0].logprobs
        with closing(made(policy, server)) as other:
            with pytest.raises(InputError, match="claimed by run 'mine'"):
                asyncio.run(other.claim("other", "run"))
            with pytest.raises(EngineError, match="claimed by run 'mine'"):
                asyncio.run(other.load_weights(moved, 2))
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
        asyncio.run(mine.load_weights(policy.named_weights(), 1))
        with server.client() as http:
            assert http.post("/release", json={"run": "mine"}).status_code == 200
        with pytest.raises(EngineError, match="'mine' has no claim"):
            asked(mine)


def test_a_prompt_that_is_too_long_is_the_inputs_fault(policy: Policy, server: Running) -> None:
    with closing(made(policy, server)) as engine, pytest.raises(InputError, match="request 7: 600 prompt tokens"):
        asked(engine, Request(7, (5,) * 600, (1,)))


def test_a_call_is_cut_to_what_a_server_takes() -> None:
    requests = [Request(k, (1,) * 90_000, (1,) * 10) for k in range(5)]
    assert [[r.key for r in part] for part in _parts(requests)] == [[0, 1], [2, 3], [4]]
    rollouts = [Request(k, (1,), (1,) * (CALL_ROLLOUTS // 2)) for k in range(3)]
    assert [[r.key for r in part] for part in _parts(rollouts)] == [[0, 1], [2]]
    assert list(_parts([])) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_is_an_error_with_its_name_in_time(
    how: signal.Signals, policy: Policy, tmp_path: Path
) -> None:
    with serving(tmp_path, "--model.device=cpu") as server, closing(made(policy, server, silence_s=4)) as engine:

        async def run() -> float:
            requests = [Request(k, IDS, tuple(range(256))) for k in range(30)]
            struck = 0.0
            async for _ in engine.generate(requests, Sampling(max_new_tokens=60)):
                if not struck:
                    os.kill(server.process.pid, how)
                    struck = time.monotonic()
            return struck

        began = time.monotonic()
        with pytest.raises(EngineError, match=f"engine {server.url}"):
            asyncio.run(run())
        assert time.monotonic() - began < 60
        if how == signal.SIGKILL:
            with pytest.raises(EngineError, match=f"engine {server.url} cannot be reached"):
                asyncio.run(engine.score(IDS))


GOOD = {
    "key": 3,
    "token_ids": [[5, 6], [7]],
    "logprobs": [[-0.5, -0.5], [-0.1]],
    "finish_reason": ["length", "stop"],
    "policy_versions": [[0, 0], [0, 0]],
    "policy_version": 0,
    "run": None,
}
WRONG: dict[str, tuple[list[Any], str]] = {
    "NaN": ([GOOD | {"logprobs": [[-0.5, float("nan")], [-0.1]]}], "no numbers"),
    "infinite": ([GOOD | {"logprobs": [[-0.5, float("-inf")], [-0.1]]}], "no numbers"),
    "none": ([GOOD | {"logprobs": [[-0.5, None], [-0.1]]}], "answers nothing"),
    "too few logprobs": ([GOOD | {"logprobs": [[-0.5], [-0.1]]}], "wrong counts"),
    "too few rollouts": ([GOOD | {"token_ids": [[5, 6]], "logprobs": [[-0.5, -0.5]]}], "wrong counts"),
    "an id too large": ([GOOD | {"token_ids": [[5, 10**6], [7]]}], "outside the vocabulary"),
    "an id below 0": ([GOOD | {"token_ids": [[5, -1], [7]]}], "outside the vocabulary"),
    "ids as text": ([GOOD | {"token_ids": [["5", "6"], ["7"]]}], "answers nothing"),
    "aborted": ([GOOD | {"finish_reason": ["abort", "stop"]}], "no known end"),
    "another key": ([GOOD | {"key": 4}], "answers nothing"),
    "the same twice": ([GOOD, GOOD], "answers nothing"),
    "an error": ([{"error": "the engine failed"}], "the engine failed"),
    "no JSON": (["<html>"], "no JSON"),
    "nothing": ([], "left out 1 of 1"),
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
    with lying(policy, [GOOD]) as url:
        [answer] = asked(VllmServer(policy, url=url))
    assert answer.token_ids == ((5, 6), (7,))
    assert answer.policy_versions == ((0, 0), (0, 0))


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
