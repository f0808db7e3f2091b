from dataclasses import fields, replace
from typing import Any

import msgspec
import pytest

from podium.errors import RewardContractError
from podium.records import Prompt, Rollout
from podium.remote.codec import AS_JSON, decode, encode
from podium.reward.isolation import MAX_REPLY, Task, decode_outcome, encode_outcome
from podium.reward.scoring.stage import Failed
from tests.builders import make_prompt, make_rollout

PROMPT = make_prompt(
    7,
    "a question with \ud800 and \0",
    {"list": [1, 2.5, None, True, "é"]},
    token_ids=(1, 1 << 40, 3),
    reward=("a", "b"),
    metadata={"k": {"deep": [1]}},
)
ROLLOUTS = (
    make_rollout(
        "text", (5, 6), rollout_logprobs=(-0.1, -1e-300), loss_mask=(1, 0), seed=(1 << 63) - 1, sample_index=1
    ),
    make_rollout("", (), policy_version_min=3, policy_version_max=4, finish_reason="length"),
)


def sent(prompt: Prompt = PROMPT) -> Task:
    task = Task("mine", (1, 0), 2.5, prompt.ordinal, encode(prompt), encode(ROLLOUTS, tuple[Rollout, ...]))
    return decode(Task, encode(task))


def prompt_of(task: Task) -> Prompt:
    return decode(Prompt, task.prompt)


def test_a_group_arrives_as_it_was_sent() -> None:
    assert {field.name for field in fields(Prompt)} == set(vars(PROMPT))
    task = sent()
    assert (task.reward, task.indices, task.limit_s, task.ordinal) == ("mine", (1, 0), 2.5, 7)
    assert prompt_of(task) == PROMPT
    rollouts = decode(tuple[Rollout, ...], task.rollouts)
    assert rollouts == ROLLOUTS
    assert {type(getattr(one, field.name)) for one in rollouts for field in fields(Rollout)} == {
        *(tuple, str, int, dict, type(None))
    }


def test_numbers_of_any_size_arrive() -> None:
    """MessagePack has 64 bits, a row of data may have more."""
    prompt = replace(PROMPT, answer=10**40)
    assert prompt_of(sent(prompt)) == prompt


def test_every_call_gets_a_prompt_of_its_own() -> None:
    task = sent()
    prompt_of(task).answer["list"].clear()
    assert prompt_of(task) == PROMPT


@pytest.mark.parametrize("outcome", [None, 0.1, -1e300, Failed("KeyError: 'a\nb'")])
def test_outcomes_arrive_as_they_were_sent(outcome: float | Failed | None) -> None:
    assert decode_outcome(encode_outcome(3, outcome), {3}) == (3, outcome)


def test_a_breach_is_raised() -> None:
    with pytest.raises(RewardContractError, match="reward 'a' returned"):
        decode_outcome(encode_outcome(0, RewardContractError("reward 'a' returned nonsense")), {0})


def test_a_breach_counts_also_where_its_rollout_has_been_told() -> None:
    """The first rollout of a call stands for all of them in a breach."""
    with pytest.raises(RewardContractError, match="nonsense"):
        decode_outcome(encode_outcome(0, RewardContractError("reward 'a' returned nonsense")), {1, 2})


def test_a_reason_without_end_is_cut() -> None:
    assert len(encode_outcome(0, Failed("\U0001f600" * 10**6))) <= MAX_REPLY


GOOD: dict[str, Any] = {"index": 0, "outcome": 1.0, "breach": None}
STRANGE = [
    *(b"", b"x", b"[]", b"null", b"\xff\xfe", b"\x91" * 60000, AS_JSON, AS_JSON + b"x", AS_JSON + b"[" * 60000),
    *(msgspec.msgpack.encode(each) for each in (None, 3, "outcome", [], {}, [0, 1.0, None])),
    *(msgspec.msgpack.encode(GOOD | {"index": index}) for index in (1, -1, "0", 0.5, None, [0])),
    *(
        msgspec.msgpack.encode(GOOD | {"outcome": value})
        for value in ("1", [1], {}, b"1", {"reason": 3}, {"reason": "a", "more": 1})
    ),
    *(msgspec.msgpack.encode(GOOD | {name: 3}) for name in ("breach", "other")),
    msgspec.msgpack.encode(GOOD) + b"\x00",
    AS_JSON + b'{"index": 0, "outcome": ' + b"9" * 60000 + b', "breach": null}',
]


@pytest.mark.parametrize("content", STRANGE)
def test_what_no_worker_would_send_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  the driver tells only that the worker sent what no reward returns
        decode_outcome(content, {0})


def test_the_strange_ones_differ_from_what_a_worker_sends() -> None:
    assert decode_outcome(msgspec.msgpack.encode(GOOD), {0}) == (0, 1.0)


def test_an_outcome_is_taken_once() -> None:
    with pytest.raises(ValueError, match="rollout 0 was not asked for"):
        decode_outcome(encode_outcome(0, 1.0), set())
