"""Episodes of several turns: the token law, tools, environments, limits and failures."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from podium.environment.build import build_playground
from podium.environment.episode import world
from podium.errors import InputError
from podium.model.chat import render
from podium.model.load import EMBEDDED
from podium.records import Group, Prompt, Request, ids_digest
from podium.rollout.conversation import Conversation
from podium.rollout.single_turn import rollout_seed
from podium.settings.tables import Settings
from tests.fakes import FakeEngine

OWN = ("calculator", "mcp", "search")
"""Tools that come with Podium."""
GAMES = str(Path(__file__).parents[1] / "environment" / "games.py")
TOKENIZER = AutoTokenizer.from_pretrained(EMBEDDED)
EOS = TOKENIZER.eos_token_id


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text, add_special_tokens=False).input_ids)


def prompt_of(ordinal: int, text: str = "What is 2 + 2?", answer: Any = "4") -> Prompt:
    messages = ({"role": "user", "content": text},)
    return Prompt(ordinal, render(TOKENIZER, messages), messages, answer)


def settings_of(
    *tools: str | dict[str, Any], environment: str = "", world: dict[str, Any] | None = None, **options: Any
) -> Settings:
    """`world` are options of the environment."""
    tables: dict[str, Any] = {"rollout": {"name": "conversation", **options}}
    given = [{"name": each} if isinstance(each, str) else each for each in tools]
    if given:
        tables["tool"] = [
            {**each, "name": each["name"] if each["name"] in OWN else f"{GAMES}:{each['name']}"} for each in given
        ]
    if environment:
        tables["environment"] = {"name": f"{GAMES}:{environment}", **(world or {})}
    return Settings.from_dict(tables)


def played(
    said: Any,
    *tools: Any,
    environment: str = "",
    rollouts: int = 2,
    rows: Sequence[Prompt] | None = None,
    after: Callable[[], Any] = lambda: None,
    **options: Any,
) -> tuple[list[Group], FakeEngine]:
    """The groups of episodes in which the policy says `said(request)`, or these texts in turn, each with its end."""
    texts = list(said) if not callable(said) else []

    def reply(request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        num_turns = request.token_ids.count(EOS)
        text = said(request) if callable(said) else texts[min(num_turns, len(texts) - 1)]
        ids = (*ids_of(text), EOS)[: request.sampling.max_new_tokens]
        return ids, tuple(-0.5 - 0.001 * place for place in range(len(ids)))

    settings = settings_of(*tools, environment=environment, **options)
    engine = FakeEngine(reply)
    playground = build_playground(settings, TOKENIZER)
    stage = Conversation(
        engine, TOKENIZER, (EOS,), len(TOKENIZER), rollouts, 11, playground=playground, **settings.rollout.options
    )

    async def run() -> list[Group]:
        try:
            groups = [group async for group in stage.start(rows or [prompt_of(0)])]
            after()
            return groups
        finally:
            stage.close()

    return asyncio.run(run()), engine


def check_token_law(group: Group, engine: FakeEngine) -> None:
    """Each request of an episode is the one before, what was sampled, and a bridge; the rollout has the same ids."""
    for rollout in group.rollouts:
        name = f"train/{group.prompt.ordinal}/{rollout.sample_index}"
        requests = [request for request in engine.requests if request.episode == name]
        assert len(requests) == len(rollout.spans)
        whole = (*group.prompt.token_ids, *rollout.token_ids)
        wrote = [0] * len(rollout.token_ids)
        for request, span in zip(requests, rollout.spans, strict=True):
            start = len(group.prompt.token_ids) + span.start
            assert request.token_ids == whole[:start]
            sampled = rollout.token_ids[span.start : span.start + span.length]
            assert span.digest == ids_digest(sampled)
            assert span.seed == request.seed
            wrote[span.start : span.start + span.length] = [1] * span.length
            assert all(value < 0 for value in rollout.rollout_logprobs[span.start : span.start + span.length])
        assert list(rollout.loss_mask) == wrote
        outside = [value for value, mask in zip(rollout.rollout_logprobs, wrote, strict=True) if not mask]
        assert outside == [0.0] * len(outside)
        assert rollout.digest == ids_digest(rollout.token_ids)


def test_a_tool_is_called_and_its_result_read() -> None:
    [group], engine = played(["<call>add(a=2, b=2)</call>", "#### 4"], "add")
    check_token_law(group, engine)
    [first, _] = group.rollouts
    assert [(turn.role, turn.text) for turn in first.turns] == [
        ("assistant", "<call>add(a=2, b=2)</call>"),
        ("tool", "4"),
        ("assistant", "#### 4"),
    ]
    assert TOKENIZER.decode(first.token_ids) == "<call>add(a=2, b=2)</call></s>4\n#### 4</s>"
    assert first.text == "#### 4"
    assert first.finish_reason == "stop"
    assert first.environment_reward is None
    assert (first.counts["tool_calls"], first.counts["tool_errors"]) == (1, 0)
    assert first.seed == rollout_seed(11, "train", 0, 0)
    assert first.spans[0].seed == first.seed
    assert first.spans[1].seed == rollout_seed(11, "train", 0, 0, 1) != first.seed


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("add(2, 3)", "5"),
        ("add(2)", "3"),
        ("add(a='x')", "error: ValueError: argument a:"),
        ("add(c=1)", "error: ValueError: argument"),
        ("sub(a=1)", "error: there is no tool 'sub'; there are: add, broken, dies, floods"),
        ("add(", "error: the call cannot be read"),
        ("add(a=__import__('os').getpid())", "error: ValueError: argument a: Input should be a valid integer"),
        ("broken(text='x')", "error: KeyError: 'gone'"),
        ("floods()", "�" * 4000 + " … (cut)"),
        ("dies()", "error: dies: "),
    ],
)
def test_what_goes_wrong_with_a_tool_is_an_observation(call: str, result: str) -> None:
    tools = ("add", "broken", "floods", "dies")
    [group], engine = played([f"<call>{call}</call>", "#### 4"], *tools, rollouts=1, max_read_tokens=8000)
    check_token_law(group, engine)
    [rollout] = group.rollouts
    assert rollout.turns[1].text.startswith(result)
    assert rollout.counts["tool_errors"] == result.startswith("error")
    assert rollout.failure == ""
    assert rollout.turns[2].text == "#### 4"


def test_a_tool_that_hangs_is_killed_and_said_to_be_late() -> None:
    [group], _ = played(["<call>hangs()</call>", "#### 4"], "hangs", rollouts=1, turn_timeout_s=0.3)
    assert group.rollouts[0].turns[1].text == "error: hangs took longer than 0.3 s"


def test_several_calls_of_a_turn_run_together_and_answer_in_order() -> None:
    calls = "<call>slow_add(1, 2)</call> and <call>slow_add(3, 4)</call>"
    [group], engine = played([calls, "done"], "slow_add", rollouts=1)
    check_token_law(group, engine)
    assert [turn.text for turn in group.rollouts[0].turns] == [calls, "3", "7", "done"]


def test_a_tool_that_is_a_class_keeps_its_state_over_one_episode() -> None:
    [group], _ = played(["<call>Counter(2)</call>", "<call>Counter()</call>", "done"], "Counter")
    for rollout in group.rollouts:
        assert [turn.text for turn in rollout.turns if turn.role == "tool"] == ["2", "3"]


def test_an_environment_answers_until_it_is_done() -> None:
    [group], engine = played(["#### 3", "#### 4"], environment="Retry")
    check_token_law(group, engine)
    [rollout, _] = group.rollouts
    assert [turn.text for turn in rollout.turns] == ["#### 3", "Wrong. Again.", "#### 4"]
    assert (rollout.environment_reward, rollout.finish_reason) == (1.0, "stop")


def test_the_first_messages_of_an_environment_follow_those_of_the_row() -> None:
    [group], engine = played(["#### 4"], environment="Opening")
    check_token_law(group, engine)
    assert TOKENIZER.decode(group.prompt.token_ids) == "<s>What is 2 + 2?\nNow.\n"
    assert engine.requests[0].token_ids == group.prompt.token_ids


@pytest.mark.parametrize(
    ("environment", "failure"),
    [
        ("Raises", "step: RuntimeError: the game is broken"),
        ("Sleeps", "step took longer than 0.5 s"),
        ("Exits", "step: "),
        ("Nonsense", "step: TypeError: step returned a int"),
    ],
)
def test_a_failed_environment_abstains(environment: str, failure: str) -> None:
    [group], engine = played(["#### 3"], environment=environment, rollouts=1, turn_timeout_s=0.5)
    check_token_law(group, engine)
    [rollout] = group.rollouts
    assert rollout.failure.startswith(failure)
    assert (rollout.finish_reason, rollout.environment_reward) == ("abort", None)


def test_an_environment_that_opens_each_episode_differently_fails_all_but_the_first() -> None:
    [group], _ = played(["#### 4"], environment="Unsteady", rollouts=3)
    assert [bool(rollout.failure) for rollout in group.rollouts] == [False, True, True]
    assert "another message than the first" in group.rollouts[1].failure


@pytest.mark.parametrize(
    ("options", "reason", "num_turns"),
    [
        ({"max_turns": 3}, "turns", 3),
        ({"max_new_tokens": 16}, "length", 3),
        ({"max_turn_tokens": 4, "max_turns": 2}, "turns", 2),
        ({"max_read_tokens": 20}, "length", 3),
    ],
)
def test_limits_end_an_episode_and_are_no_failure(options: dict[str, int], reason: str, num_turns: int) -> None:
    """`#### 3</s>` has 7 ids, and `Go on.` with a new line also 7."""
    [group], engine = played(["#### 3"], environment="Endless", rollouts=1, **options)
    check_token_law(group, engine)
    [rollout] = group.rollouts
    assert (rollout.finish_reason, len(rollout.spans), rollout.failure) == (reason, num_turns, "")
    assert rollout.environment_reward == 0.0
    written = sum(rollout.loss_mask)
    assert written <= options.get("max_new_tokens", 10**9)
    assert len(rollout.token_ids) - written <= options.get("max_read_tokens", 10**9)


def test_an_episode_that_takes_too_long_abstains() -> None:
    [group], _ = played(["#### 3"], environment="Sleeps", rollouts=1, episode_timeout_s=0.4)
    assert "episode_timeout_s = 0.4" in group.rollouts[0].failure


def test_a_cut_turn_gets_its_end_from_the_bridge() -> None:
    [group], engine = played(["#### 3"], environment="Endless", rollouts=1, max_turn_tokens=4, max_turns=2)
    check_token_law(group, engine)
    assert TOKENIZER.decode(group.rollouts[0].token_ids) == "####</s>Go on.\n####"


def test_nothing_to_talk_to_is_refused() -> None:
    with pytest.raises(InputError, match="nothing to talk to"):
        played(["x"])


def test_special_tokens_in_a_tool_result_are_text() -> None:
    [group], engine = played(["<call>ends()</call>", "#### 4"], "ends", rollouts=1)
    check_token_law(group, engine)
    assert group.rollouts[0].turns[1].text == "a</s>b"
    assert group.rollouts[0].token_ids.count(EOS) == 2


def test_an_episode_that_begins_without_the_message_of_its_group_is_not_trained(tmp_path: Path) -> None:
    """The engine read other ids for it than the group's prompt. The option is a path, which travels as text."""
    [group], engine = played(["#### 4"], environment="OpensOnce", rollouts=3, world={"mark": tmp_path / "mark"})
    opened = [request.token_ids == group.prompt.token_ids for request in engine.requests]
    assert opened.count(True) == 1
    assert [not rollout.failure for rollout in group.rollouts] == [
        next(r for r in engine.requests if r.episode == f"train/0/{k}").token_ids == group.prompt.token_ids
        for k in range(3)
    ]


def test_nobody_is_shown_the_example_answer_of_a_row(tmp_path: Path) -> None:
    row = prompt_of(0)
    row = replace(row, messages=(*row.messages, {"role": "assistant", "content": "SECRET"}))
    [group], engine = played(["#### 4"], environment="Opening", rollouts=1, rows=[row])
    assert TOKENIZER.decode(engine.requests[0].token_ids) == "<s>What is 2 + 2?\nNow.\n"
    notes = {"notes": tmp_path / "notes"}
    [group], _ = played(["again", "end"], environment="Closes", rollouts=1, rows=[row], world=notes)
    assert group.rollouts[0].turns[1].text == "['What is 2 + 2?']"


def test_close_is_called_once_for_each_episode_and_numbers_of_info_are_counted(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    [group], _ = played(["again", "end"], environment="Closes", rollouts=3, world={"notes": notes})
    assert notes.read_text() == "closed\n" * 3
    assert {rollout.counts["info/steps"] for rollout in group.rollouts} == {2.0}
    assert {rollout.environment_reward for rollout in group.rollouts} == {1.0}
    [group], _ = played(["again", "end"], environment="Closes", rollouts=1, world={"notes": notes, "reward": "last"})
    assert group.rollouts[0].environment_reward == 0.5


def test_a_first_message_that_is_too_long_fails_the_episode_and_not_the_run() -> None:
    [group], engine = played(["#### 4"], environment="Talkative", rollouts=2, max_read_tokens=100)
    assert not engine.requests
    assert all("more than rollout.max_read_tokens = 100" in rollout.failure for rollout in group.rollouts)
    assert group.oldest_version == 0
    assert group.rollouts[0].token_ids == ()


def test_a_failed_reset_has_the_version_of_the_weights_at_that_time() -> None:
    """An older version would make the whole group too old for an asynchronous run."""

    def said(request: Request) -> str:
        return "#### 4"

    [group], engine = played(said, environment="Talkative", rollouts=1, max_read_tokens=10)
    assert (group.rollouts[0].policy_version_min, engine.policy_version) == (0, 0)


def test_with_tools_and_an_environment_turns_without_calls_go_to_the_environment() -> None:
    [group], engine = played(["<call>add(1, 2)</call>", "#### 3", "#### 4"], "add", environment="Retry")
    check_token_law(group, engine)
    [rollout, _] = group.rollouts
    assert [(turn.role, turn.text) for turn in rollout.turns[1:4]] == [
        ("tool", "3"),
        ("assistant", "#### 3"),
        ("user", "Wrong. Again."),
    ]
    assert rollout.environment_reward == 1.0


def test_an_episode_of_nothing_but_calls_is_scored_with_the_reward_so_far() -> None:
    [group], _ = played(["<call>add(1)</call>"], "add", environment="Retry", rollouts=1, max_turns=3)
    [rollout] = group.rollouts
    assert (rollout.finish_reason, rollout.environment_reward, rollout.failure) == ("turns", 0.0, "")


def test_a_tool_with_state_that_hangs_begins_anew_and_the_environment_goes_on() -> None:
    """With one process each: the late one gives up its place before the next is started."""
    calls = ["<call>HangsOnce()</call>", "<call>HangsOnce(wait=True)</call>", "<call>HangsOnce()</call>", "#### 4"]
    [group], _ = played(
        calls, "HangsOnce", environment="Retry", rollouts=2, max_processes=1, turn_timeout_s=0.5, episode_timeout_s=60
    )
    for rollout in group.rollouts:
        results = [turn.text for turn in rollout.turns if turn.role == "tool"]
        assert results == ["1", "error: HangsOnce took longer than 0.5 s", "1"]
        assert (rollout.environment_reward, rollout.failure) == (1.0, "")


def test_a_slow_close_answers_no_call_of_the_next_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "CLOSE_S", 0.2)
    [group], _ = played(
        ["<call>SlowClose()</call>", "<call>SlowClose()</call>", "end"], "SlowClose", rollouts=3, max_processes=1
    )
    for rollout in group.rollouts:
        assert [turn.text for turn in rollout.turns if turn.role == "tool"] == ["1", "2"]


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ("keeps('x', )", "x PosixPath ('a', 'b')"),
        ("keeps(path=(1, 2))", "error: ValueError: argument path"),
        ("keeps(path={1, 2})", "x"),
        ("keeps(path=b'x')", "b'x' PosixPath"),
        ("keeps(path=...)", "... PosixPath"),
    ],
)
def test_values_that_json_does_not_have_are_their_text(tmp_path: Path, call: str, result: str) -> None:
    tool = {"name": "keeps", "folder": tmp_path}
    [group], _ = played([f"<call>{call}</call>", "end"], tool, rollouts=1)
    text = group.rollouts[0].turns[1].text
    assert text.startswith(result) or call == "keeps(path={1, 2})", text


def test_nothing_is_left_behind_by_a_timeout_or_a_finished_stage() -> None:
    """While the stage is there, a late process is gone already; afterwards all are."""
    me, late = psutil.Process(), []

    def look() -> None:
        late.extend(each for each in me.children(recursive=True) if each.status() == psutil.STATUS_ZOMBIE)

    before = set(me.children(recursive=True))
    calls = ["<call>hangs()</call>", "<call>dies()</call>", "<call>HangsOnce(wait=True)</call>", "end"]
    played(calls, "hangs", "dies", "HangsOnce", rollouts=2, turn_timeout_s=0.3, after=look)
    assert late == []
    deadline = time.monotonic() + 30
    while set(me.children(recursive=True)) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(me.children(recursive=True)) - before == set()


def test_a_turn_is_read_without_its_thinking() -> None:
    [group], _ = played(["<think><call>add(1)</call></think>#### 4"], "add", environment="Retry", rollouts=1)
    assert group.rollouts[0].environment_reward == 1.0
    assert "tool_calls" not in group.rollouts[0].counts
