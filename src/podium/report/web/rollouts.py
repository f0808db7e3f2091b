"""Which rollouts a page carries: a selection, so that the page stays small however long the run is.

A long run shows every 2^n-th step and the last few steps. A step shows its best rollouts, its worst and some in
between. Long texts are truncated, and the page says so; `podium report` shows any step in full.
"""

import json
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

MAX_GRID_STEPS = 32
LAST_STEPS = 3
ROLLOUTS_PER_STEP = 12
MAX_STEP_BYTES = 100_000
MAX_TEXT, MAX_PROMPT, MAX_TOKENS = 12_000, 6_000, 1_200


def shown_steps(last: int) -> list[int]:
    """A selection of steps 1 … last. A step that a longer run shows was already shown when the run was shorter."""
    stride = 1
    while last > MAX_GRID_STEPS * stride:
        stride *= 2
    return sorted({*range(1, last + 1, stride), *range(max(1, last - LAST_STEPS + 1), last + 1)})


KINDS: dict[str, tuple[type, ...]] = {
    "ordinal": (int,),
    "sample_index": (int,),
    "policy_version": (int, list),
    "trained": (bool,),
    "prompt": (str,),
    "text": (str,),
    "reward": (int, float, NoneType),
    "reward_parts": (dict,),
    "correct": (bool, NoneType),
    "advantage": (int, float, NoneType),
    "finish_reason": (str,),
    "token_ids": (list,),
    "logprobs": (list,),
}
"""Fields that a ledger line must have, and their types; `answer` may have any type."""


def is_whole(line: Mapping[str, Any]) -> bool:
    """Whether a page can show the line: another program may have written it, or a disk may have damaged it."""
    return (
        "answer" in line
        and all(key in line and isinstance(line[key], kinds) for key, kinds in KINDS.items())
        and all(type(token_id) is int for token_id in line["token_ids"])
        and all(isinstance(value, (int, float)) for value in line["logprobs"])
        and isinstance(line.get("logprob_gaps"), (list, NoneType))
    )


def chosen(lines: Sequence[Mapping[str, Any]], step: int) -> list[dict[str, Any]]:
    """A few of one step's ledger lines, without duplicates: the best, the worst and some in between."""
    different = list({(line["prompt"], line["text"], line["reward"]): line for line in lines}.values())
    ranked = sorted(different, key=lambda line: -_reward(line))
    third = ROLLOUTS_PER_STEP // 3
    if len(ranked) > ROLLOUTS_PER_STEP:
        between = ranked[third:-third]
        stride = len(between) / (ROLLOUTS_PER_STEP - 2 * third)
        spread = [between[int(number * stride)] for number in range(ROLLOUTS_PER_STEP - 2 * third)]
        ranked = [*ranked[:third], *spread, *ranked[-third:]]
    made: list[dict[str, Any]] = []
    room = MAX_STEP_BYTES
    for line in ranked:
        small = for_page(line, step, is_cut=True)
        room -= len(json.dumps(small))
        if made and room < 0:
            break
        made.append(small)
    return made


def for_page(line: Mapping[str, Any], step: int, *, is_cut: bool) -> dict[str, Any]:
    """A ledger line in the form that the page's script reads; `is_cut` truncates its texts and its tokens."""
    text, prompt = str(line["text"]), str(line["prompt"])
    ends = (MAX_TEXT, MAX_PROMPT, MAX_TOKENS) if is_cut else (None, None, None)
    made = {
        "step": step,
        "ordinal": line["ordinal"],
        "sample": line["sample_index"],
        "version": line["policy_version"],
        "trained": line["trained"],
        "source": line.get("source", ""),
        "prompt": prompt[: ends[1]],
        "answer": str(line["answer"])[: ends[1]],
        "text": text[: ends[0]],
        "reward": line["reward"],
        "parts": line["reward_parts"],
        "correct": line["correct"],
        "advantage": line["advantage"],
        "finish": line["finish_reason"],
        "num_tokens": len(line["token_ids"]),
        "num_chars": len(text),
        "ids": line["token_ids"][: ends[2]],
        "logprobs": [round(value, 4) for value in line["logprobs"][: ends[2]]],
    }
    gaps = line.get("logprob_gaps")
    return made if gaps is None else made | {"gaps": gaps[: ends[2]]}


def _reward(line: Mapping[str, Any]) -> float:
    """Rollouts without a reward rank last, so that the page shows some of them too."""
    return float("-inf") if line["reward"] is None else line["reward"]
