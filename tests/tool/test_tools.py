"""The tools that come with Podium."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from podium.errors import InputError
from podium.tool.calculator import calculator
from podium.tool.search import search
from tests.rollout.test_conversation import played

SERVER = [sys.executable, str(Path(__file__).parent / "mcp_server.py")]


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("347*86", "29842"),
        ("(3 + 4) * 2", "14"),
        ("7 / 2", "3.5"),
        ("1 / 3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("-2 ** 2", "-4"),
        ("2^10", "1024"),
        ("6 ÷ 3 × 2", "4"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** -2", "0.25"),
        ("12345678901234567890 * 98765432109876543210", "1219326311370217952237463801111263526900"),
    ],
)
def test_the_calculator_is_exact(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "x",
        "__import__('os')",
        "1 if 1 else 2",
        "9**9**9",
        "(10**900)*(10**900)",
        "1/0",
        "'a'*9",
        "True+1",
        "2**0.5",
        "1j",
    ],
)
def test_the_calculator_refuses_what_is_no_arithmetic(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculator(expression)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = ["The cat sat on the mat.", "Dogs bark at night.", "A mathematician proves theorems.", "Cats like fish."]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def test_search_finds_what_matches_best(corpus: Path) -> None:
    pytest.importorskip("bm25s")
    assert search("Which mathematician?", corpus=corpus).startswith("[1] A mathematician proves")
    assert search("zebra", corpus=corpus) == "nothing found"
    assert search("cat dogs mat", corpus=corpus, results=1) == "[1] The cat sat on the mat."
    with pytest.raises(ValueError, match="empty"):
        search(" ", corpus=corpus)


def test_a_corpus_without_passages_is_refused(tmp_path: Path, corpus: Path) -> None:
    pytest.importorskip("bm25s")
    with pytest.raises(InputError, match="line 1: no text under the key 'body'"):
        search("cat", corpus=corpus, column="body")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="holds no passages"):
        search("cat", corpus=tmp_path / "empty.jsonl")


def test_the_tools_of_a_server_are_listed_and_called() -> None:
    pytest.importorskip("mcp")
    from podium.tool.mcp import Mcp

    listed = {each["function"]["name"]: each["function"] for each in Mcp.schemas(command=SERVER)}
    assert set(listed) == {"shout", "tick", "fails", "dies"}
    assert listed["shout"]["description"] == "Says it louder."
    assert listed["shout"]["parameters"]["properties"]["times"]["type"] == "integer"
    loop, client = asyncio.new_event_loop(), Mcp(command=SERVER)

    def called(name: str, **arguments: Any) -> str:
        return loop.run_until_complete(asyncio.wait_for(client.call(name, arguments), 30))

    try:
        assert called("shout", text="hi", times=2) == "HI HI"
        assert [called("tick"), called("tick")] == ["1", "2"]
        with pytest.raises(RuntimeError, match="fails"):
            called("fails")
    finally:
        loop.run_until_complete(client.close())
        loop.close()


def test_only_some_tools_of_a_server_may_be_offered() -> None:
    pytest.importorskip("mcp")
    from podium.tool.mcp import Mcp

    assert [each["function"]["name"] for each in Mcp.schemas(command=SERVER, only=["tick"])] == ["tick"]
    with pytest.raises(InputError, match="no tool 'tock'; it has: shout"):
        Mcp.schemas(command=SERVER, only=["tock"])


def test_a_server_that_does_not_start_is_named() -> None:
    pytest.importorskip("mcp")
    from podium.tool.mcp import Mcp

    with pytest.raises(RuntimeError, match="cannot be reached"):
        Mcp.schemas(command=["/bin/false"])
    with pytest.raises(InputError, match="either command or url"):
        Mcp()


def test_tools_of_a_server_and_search_are_called_in_an_episode(corpus: Path) -> None:
    """Also where an event loop runs, as in `podium check`; a server that died is started again."""
    pytest.importorskip("mcp")
    pytest.importorskip("bm25s")
    calls = ["tick()", "tick()", "dies()", "tick()", "search('mathematician')"]

    async def group() -> Any:
        return await asyncio.to_thread(
            played,
            [f"<call>{call}</call>" for call in calls] + ["end"],
            {"name": "mcp", "command": SERVER},
            {"name": "search", "corpus": str(corpus)},
            rollouts=1,
            max_read_tokens=2000,
            max_new_tokens=500,
            turn_timeout_s=60.0,
        )

    [made], _ = asyncio.run(group())
    results = [turn.text for turn in made.rollouts[0].turns if turn.role == "tool"]
    assert results[:2] == ["1", "2"]
    assert results[2].startswith("error")
    assert results[3] == "1"
    assert results[4].startswith("[1] A mathematician proves")
