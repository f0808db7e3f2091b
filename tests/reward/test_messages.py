import io
from dataclasses import fields, replace

import pytest

from podium.errors import RewardContractError
from podium.records import Group, Prompt, Rollout
from podium.reward._messages import Failed, Task, decode, decode_outcome, encode_group, encode_outcome, encode_task
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
TASK = Task("mine", (1, 0), 2.5, 7)


def test_a_group_arrives_as_it_was_sent() -> None:
    assert {field.name for field in fields(Prompt)} == set(vars(PROMPT))
    frame = io.BytesIO(encode_task(TASK, encode_group(Group(PROMPT, ROLLOUTS))))
    task, prompt, rollouts = decode(frame.read)
    assert task == TASK
    assert prompt() == PROMPT
    assert rollouts == ROLLOUTS
    assert {type(getattr(one, field.name)) for one in rollouts for field in fields(Rollout)} == {tuple, str, int}
    assert frame.read() == b""


def test_every_call_gets_a_prompt_of_its_own() -> None:
    _, prompt, _ = decode(io.BytesIO(encode_task(TASK, encode_group(Group(PROMPT, ROLLOUTS)))).read)
    prompt().answer["list"].clear()
    assert prompt() == PROMPT


@pytest.mark.parametrize("outcome", [None, 0.1, -1e300, Failed("KeyError: 'a\nb'")])
def test_outcomes_arrive_as_they_were_sent_one_a_line(outcome: float | Failed | None) -> None:
    line = encode_outcome(3, outcome)
    assert line.count(b"\n") == 1
    assert decode_outcome(line, {3}) == (3, outcome)


def test_a_breach_is_raised() -> None:
    with pytest.raises(RewardContractError, match="reward 'a' returned"):
        decode_outcome(encode_outcome(0, RewardContractError("reward 'a' returned nonsense")), {0})


def test_a_breach_counts_also_where_its_rollout_has_been_told() -> None:
    """The first rollout of a call stands for all of them in a breach."""
    with pytest.raises(RewardContractError, match="nonsense"):
        decode_outcome(encode_outcome(0, RewardContractError("reward 'a' returned nonsense")), {1, 2})


def test_a_reason_without_end_is_cut() -> None:
    assert len(encode_outcome(0, Failed("\U0001f600" * 10**6))) < 65536


STRANGE = [
    *(b"", b"x", b"[]", b"{}", b"3", b"null", b'"value"', b"\xff\xfe", b"[" * 60000),
    *(b'[0, "value"]', b'[0, "value", "1"]', b'[0, "value", [1]]', b'[0, "value", 1, 2]'),
    *(b'["0", "value", 1]', b'[0.0, "value", 1.0]', b'[1, "value", 1.0]'),
    *(b'[0, "other", 1.0]', b'[0, "failed", 3]', b'[0, "breach", null]'),
    b'[0, "value", ' + b"9" * 60000 + b"]",
]


@pytest.mark.parametrize("line", STRANGE)
def test_what_no_worker_would_send_is_refused(line: bytes) -> None:
    with pytest.raises((ValueError, RecursionError)):
        decode_outcome(line, {0})


def test_an_outcome_is_taken_once() -> None:
    with pytest.raises(ValueError, match="not an outcome"):
        decode_outcome(encode_outcome(0, 1.0), set())


def test_the_frame_of_a_task_does_not_depend_on_earlier_ones() -> None:
    encoded = encode_group(Group(PROMPT, ROLLOUTS))
    first = encode_task(TASK, encoded)
    encode_task(replace(TASK, indices=(0,)), encoded)
    assert encode_task(TASK, encoded) == first
