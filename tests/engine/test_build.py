"""What an engine is made with: precision, whether it overlaps with the trainer, and vLLM's context."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from podium.engine.build import fitted, make_engine
from podium.settings.tables import Settings
from tests.runtime.test_memory import settings_of


@pytest.mark.parametrize(("run", "overlaps"), [({}, False), ({"sync_every": 2}, False), ({"max_lag": 1}, True)])
def test_an_engine_is_handed_the_trainers_precision_and_whether_both_work_at_the_same_time(
    run: dict[str, Any], overlaps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handed: list[Any] = []

    class Handed:
        def __init__(self, policy: Any, snapshot: bool, compute_dtype: Any, overlaps: bool) -> None:
            handed.extend([snapshot, compute_dtype, overlaps])

    monkeypatch.setattr("podium.engine.build.find", lambda kind, name: Handed)
    settings = settings_of(tmp_path, run=run, trainer={"precision": "bfloat16"})
    policy = cast(Any, SimpleNamespace(model=SimpleNamespace(dtype=torch.float32)))
    make_engine(settings, policy=policy, snapshot=settings.plan.needs_snapshot)
    assert handed == [bool(run), torch.bfloat16, overlaps]


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
