"""vLLM's context: what the run needs, unless the settings say otherwise."""

from typing import Any

import pytest

from podium.runtime._engine import fitted
from podium.settings import Settings


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({"name": "vllm_local"}, 300 + 40),
        ({"name": "vllm_local", "max_context_tokens": 512}, 512),
        ({"name": "pool", "of": "vllm_local"}, 300 + 40),
        ({"name": "inprocess"}, None),
    ],
)
def test_the_context_holds_the_longest_prompt_and_its_answer(engine: dict[str, Any], expected: int | None) -> None:
    tables = {"engine": engine, "rollout": {"max_new_tokens": 40}, "reward": [{"name": "arithmetic"}]}
    options = fitted(Settings.from_dict({**tables, "data": [{"name": "arithmetic"}]}), 300).engine.options
    assert (options | options.get("member", {})).get("max_context_tokens") == expected
