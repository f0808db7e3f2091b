"""How a group travels to a reward worker, and what comes back: JSON and raw numbers, never pickles.

There: a frame of a header with four lengths, then the task, the prompt and the rollouts as JSON, then their tokens as
arrays of numbers. Back: a line of JSON for each rollout, `[index, kind, content]`, which the driver takes for what a
stranger sent: a worker runs code that may have gone wrong.
"""

import json
import struct
from array import array
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from podium.errors import InputError, RewardContractError
from podium.records import Group, Prompt, Rollout

HEADER = struct.Struct("<4Q")
NUMBERS = (("token_ids", "q"), ("rollout_logprobs", "d"), ("loss_mask", "B"))
"""Fields of a rollout that have one entry a token, with their type codes."""
MAX_LINE = 1 << 16
MAX_REASON = 1000
OUT_OF_MEMORY = 77
"""Exit code of a worker that gives up because it is full."""


@dataclass(frozen=True)
class Failed:
    """A call that gave no value: it raised, took too long or took its process down. The rollout abstains."""

    reason: str


Outcome = float | None | Failed


@dataclass(frozen=True)
class Task:
    """What a worker is asked: one reward on some rollouts of a group."""

    reward: str
    indices: tuple[int, ...]
    limit_s: float
    """What one call may take; the driver watches over it, the worker only bounds its processor time by it."""
    seed: int
    """Of Python's random numbers."""


@dataclass(frozen=True)
class EncodedGroup:
    """A group on its way to workers, made once for all of its rewards."""

    ordinal: int
    num_rollouts: int
    lengths: tuple[int, int, int]
    content: bytes


def encode_group(group: Group) -> EncodedGroup:
    """An `InputError` if the prompt holds what JSON cannot carry."""
    prompt = json.dumps(_plain_prompt(group.prompt)).encode()
    flat = {name for name, _ in NUMBERS}
    plain = [{name: value for name, value in vars(one).items() if name not in flat} for one in group.rollouts]
    sizes = [[len(getattr(one, name)) for name, _ in NUMBERS] for one in group.rollouts]
    rollouts = json.dumps([plain, sizes, len(group.prompt.token_ids)]).encode()
    numbers = _packed("q", group.prompt.token_ids)
    numbers += b"".join(_packed(code, getattr(one, name)) for one in group.rollouts for name, code in NUMBERS)
    lengths = (len(prompt), len(rollouts), len(numbers))
    return EncodedGroup(group.prompt.ordinal, len(group.rollouts), lengths, prompt + rollouts + numbers)


def encode_task(task: Task, group: EncodedGroup) -> bytes:
    """A whole frame."""
    line = json.dumps([task.reward, task.indices, task.limit_s, task.seed]).encode()
    return HEADER.pack(len(line), *group.lengths) + line + group.content


def decode(read: Callable[[int], bytes]) -> tuple[Task, Callable[[], Prompt], tuple[Rollout, ...]]:
    """The next frame; `read(n)` gives exactly n bytes. The prompt is made anew for each call, which may change it."""
    task_length, prompt_length, rollouts_length, numbers_length = HEADER.unpack(read(HEADER.size))
    reward, indices, limit_s, seed = json.loads(read(task_length))
    prompt_text = read(prompt_length)
    plain, sizes, num_prompt_ids = json.loads(read(rollouts_length))
    cursor = _Numbers(read(numbers_length))
    prompt_ids = cursor.take("q", num_prompt_ids)
    rollouts = []
    for fields, counts in zip(plain, sizes, strict=True):
        fields |= {name: cursor.take(code, count) for (name, code), count in zip(NUMBERS, counts, strict=True)}
        rollouts.append(Rollout(**fields))

    def prompt() -> Prompt:
        fields = json.loads(prompt_text)
        fields |= {"messages": tuple(fields["messages"]), "reward": tuple(fields["reward"])}
        return Prompt(token_ids=prompt_ids, **fields)

    return Task(reward, tuple(indices), limit_s, seed), prompt, tuple(rollouts)


def encode_outcome(index: int, outcome: Outcome | RewardContractError) -> bytes:
    """The line that a worker sends for one rollout."""
    if isinstance(outcome, Failed):
        line = [index, "failed", outcome.reason[:MAX_REASON]]
    elif isinstance(outcome, RewardContractError):
        line = [index, "breach", str(outcome)[:MAX_REASON]]
    else:
        line = [index, "value", outcome]
    return json.dumps(line).encode() + b"\n"


def decode_outcome(line: bytes, expected: Container[int]) -> tuple[int, Outcome]:
    """ValueError for what no worker of ours would send; a breach of contract is raised as the error that it is."""
    match json.loads(line):
        case [int(index), "failed", str(reason)] if index in expected:
            return index, Failed(reason)
        case [int(index), "value", (None | int() | float()) as value] if index in expected:
            return index, value
        case [int(), "breach", str(message)]:  # whichever rollout it was, the run stops
            raise RewardContractError(message)
    raise ValueError("not an outcome")


def _plain_prompt(prompt: Prompt) -> dict[str, Any]:
    """Everything but the ids. Rewards in workers see plain data, so what JSON would change is refused."""
    for name, value in (("answer", prompt.answer), ("metadata", dict(prompt.metadata))):
        try:
            is_plain = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError, RecursionError):
            is_plain = False
        if not is_plain:
            raise InputError(
                f"prompt {prompt.ordinal} ({prompt.source or 'data'}): its {name} {value!r:.80} is not plain data; "
                "rewards in worker processes need it: use numbers, texts, lists and tables with texts as keys"
            )
    fields = {name: value for name, value in vars(prompt).items() if name != "token_ids"}
    return fields | {"messages": [dict(turn) for turn in prompt.messages], "metadata": dict(prompt.metadata)}


def _packed(code: str, numbers: Sequence[Any]) -> bytes:
    return bytes(numbers) if code == "B" else array(code, numbers).tobytes()  # for bytes this is three times faster


class _Numbers:
    """Reads arrays one after the other from a buffer."""

    def __init__(self, buffer: bytes) -> None:
        self._buffer, self._at = buffer, 0

    def take(self, code: str, count: int) -> tuple[Any, ...]:
        numbers = array(code)
        end = self._at + count * numbers.itemsize
        numbers.frombytes(self._buffer[self._at : end])
        self._at = end
        return tuple(numbers.tolist())
