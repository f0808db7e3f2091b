"""Every verifier on every hostile text: a value within its range, at once, and no reward for noise."""

import time
from typing import Any

import pytest

from podium.reward.instructions.ifeval import INSTRUCTIONS
from podium.reward.instructions.tulu3 import FUNCTIONS
from podium.reward.scoring.stage import check_value
from podium.settings.lookup import choices, find
from tests.builders import make_prompt, make_rollout
from tests.reward.hostile_texts import HOSTILE
from tests.reward.test_ifeval import IFEVAL, TULU3

IFEVAL_LABEL = {
    "instruction_id_list": list(INSTRUCTIONS),
    "kwargs": [next(kwargs for name, kwargs, *_ in IFEVAL if name == wanted) for wanted in INSTRUCTIONS],
}
TULU3_LABEL = [
    {"func_name": wanted, **next(arguments for name, arguments, *_ in TULU3 if name == wanted)} for wanted in FUNCTIONS
]
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "arithmetic": ("arithmetic", 18, {}),
    "arithmetic_lax": ("arithmetic_lax", 18, {}),
    "ifeval": ("ifeval", IFEVAL_LABEL, {}),
    "ifeval, Tulu 3": ("ifeval", TULU3_LABEL, {"all_or_nothing": True}),
    "overlong": ("overlong", None, {"free_tokens": 10, "buffer_tokens": 10}),
    "puzzle": ("puzzle", ["18", "eighteen"], {}),
    "max_length": ("max_length", "18", {}),
}
ELSEWHERE = {"code", "code_stdio", "judge", "rubric", "reasoning_gym", "environment"}
"""They run programs, ask a model, need a row of a task or read no text; their own tests attack them."""
CASES |= {name: (name, "18", {}) for name in choices("reward") if name not in {*CASES, *ELSEWHERE}}
COMPARES = set(CASES) - {"length", "max_length", "overlong", "ifeval", "ifeval, Tulu 3", "think_format", "r1_format"}
RIGHT = {"a lone surrogate", "right to left", "full-width digits"}
"""The only texts that hold the answer 18 in the digits 0-9, or in their full-width forms."""


@pytest.mark.parametrize("title", HOSTILE)
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_text_is_scored_at_once_and_not_rewarded(case: str, title: str) -> None:
    name, answer, options = CASES[case]
    function = find("reward", name)
    prompt = make_prompt(answer=answer)
    started = time.process_time()
    value = check_value(name, function, function(prompt, make_rollout(HOSTILE[title]), **options), prompt)
    assert time.process_time() - started < (5 if name == "ifeval" else 2)  # it checks 25 instructions here
    assert value is not None
    assert value < 0.5 or case not in COMPARES or title in RIGHT
