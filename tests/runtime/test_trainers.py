"""Every trainer on two ranks: a step that is not finite, a resume, and runs that start from other weights.

Each run is a real one, loop, engine, sync and checkpoints included; the two processes stay for all of them. It must end
with what one process with `single` ends with.
"""

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from podium.errors import InputError, RankError
from tests.trainer.ranks import Pair, whole_run

KINDS: dict[str, dict[str, Any]] = {
    "single": {"name": "single"},
    "fsdp": {"name": "fsdp"},
    "zero-2": {"name": "deepspeed", "zero": 2},
    "zero-2, offload": {"name": "deepspeed", "zero": 2, "offload": True},
    "zero-3": {"name": "deepspeed", "zero": 3},
    "zero-3, offload": {"name": "deepspeed", "zero": 3, "offload": True},
}
NAN_ONCE = '''
from dataclasses import replace
from podium.loss.grpo import grpo

def nan_once(policy_logprobs, old_logprobs, batch):
    """No number in the second of the steps of four prompts."""
    made = grpo(policy_logprobs, old_logprobs, batch)
    return replace(made, per_token=made.per_token * float("nan")) if set(batch.ordinals) & {4, 5, 6, 7} else made
'''
TOLERANCE = 1e-5
"""On weights after three updates of AdamW at 1e-4."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    if KINDS[request.param]["name"] == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (extra deepspeed)")
    return KINDS[request.param]


def tables(folder: Path, trainer: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Steps of several batches a rank."""
    run = {"folder": str(folder), "steps": 2, "prompts_per_step": 4, "rollouts_per_prompt": 4, **others.pop("run", {})}
    return {
        "run": run,
        "model": {"device": "cpu", **others.pop("model", {})},
        "rollout": {"max_new_tokens": 24},
        "data": [{"name": "arithmetic", "max_rows": 1000}],
        "reward": [{"name": "arithmetic"}],
        "trainer": {"lr": 1e-4, **trainer},
        "pack": {"max_tokens_per_batch": 128},
        "checkpoint": {"every": 2, **others.pop("checkpoint", {})},
        "report": [{"name": "console"}],
        **others,
    }


def on_two(pair: Pair, given: dict[str, Any], resume: bool = False) -> Path:
    results = pair(whole_run, given | {"runtime": {"ranks": 2}}, resume)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return Path(given["run"]["folder"])


def alone(given: dict[str, Any]) -> Path:
    whole_run(given)
    return Path(given["run"]["folder"])


def final(folder: Path) -> dict[str, torch.Tensor]:
    [file] = (folder / "final").glob("*.safetensors")
    return load_file(file)


def told(folder: Path, metric: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[metric] for line in lines if metric in line]


def assert_same_end(found: Path, expected: Path, tolerance: float = TOLERANCE) -> None:
    mine, theirs = final(found), final(expected)
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.allclose(mine[name], tensor, rtol=0, atol=tolerance), name


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that others start from; its adapter has moved."""
    made = alone(tables(tmp_path_factory.mktemp("first") / "run", {"name": "single", "lr": 1e-3}))
    assert told(made, "optim/skipped") == [0, 0]
    return made


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, first: Path) -> dict[str, Path]:
    """What one process makes of each case."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "losses.py").write_text(NAN_ONCE)
    return {name: alone(given) for name, given in cases(folder, {"name": "single"}, first, folder).items()}


def cases(folder: Path, kind: dict[str, Any], first: Path, losses: Path) -> dict[str, dict[str, Any]]:
    nan = {"loss": {"name": f"{losses / 'losses.py'}:nan_once"}, "run": {"steps": 4}}
    return {
        "not finite": tables(folder / "nan", kind, **nan),
        "not finite, full": tables(folder / "nan-full", kind, **nan, model={"lora": False}),
        "adapter": tables(folder / "adapter", kind, checkpoint={"start_from": str(first / "final")}),
        "start_from": tables(folder / "start", kind, checkpoint={"start_from": str(first)}),
    }


WEIGHTS = {"single": "start_from", "fsdp": "adapter", "zero-2": "start_from", "zero-3": "adapter"}
"""Which weights a trainer is tried with: what reads them is the same for all, and so is what takes them of either."""
NOT_FINITE = {"zero-2, offload": ["not finite"], "zero-3, offload": ["not finite, full"]}
"""Offloading moves moments, of an adapter or of all weights alike; the others are tried with both."""
TRIED = [
    (kind, case)
    for kind in KINDS
    for case in (*NOT_FINITE.get(kind, ["not finite", "not finite, full"]), WEIGHTS.get(kind))
    if case is not None
]


@pytest.mark.parametrize(("kind", "case"), TRIED, indirect=["kind"])
def test_two_ranks_end_where_one_process_does(
    pair: Pair, kind: dict[str, Any], case: str, first: Path, expected: dict[str, Path], tmp_path: Path
) -> None:
    found = on_two(pair, cases(tmp_path, kind, first, expected["not finite"].parent)[case])
    skipped = [0, 1, 0, 0] if case.startswith("not finite") else [0, 0]
    assert told(found, "optim/skipped") == told(expected[case], "optim/skipped") == skipped
    assert max(told(found, "mismatch/abs_mean")[:1]) < 1e-4
    assert_same_end(found, expected[case])


@pytest.mark.parametrize("kind", [name for name in KINDS if name != "zero-2, offload"], indirect=True)
def test_a_run_of_two_ranks_that_was_broken_off_ends_as_the_unbroken_one(
    pair: Pair, kind: dict[str, Any], expected: dict[str, Path], tmp_path: Path
) -> None:
    """Broken off right after a step that was not finite. That moments in offloaded memory come back is shown with
    ZeRO-3 here and with ZeRO-2 in trainer/test_sharded.py."""
    losses = expected["not finite"].parent / "losses.py"
    given = tables(tmp_path / "run", kind, loss={"name": f"{losses}:nan_once"})
    on_two(pair, given)
    found = on_two(pair, given | {"run": given["run"] | {"steps": 4}}, resume=True)
    assert told(found, "optim/skipped") == [0, 1, 0, 0]
    assert_same_end(found, expected["not finite"])


def run_with_another_base(given: dict[str, Any], rank: int, ranks: int) -> str:
    """Rank 1 reads other frozen weights than rank 0, as from another revision of the model."""
    from podium.runtime.wiring import trainer

    load = trainer.load_policy

    def load_another(*args: Any, **options: Any) -> Any:
        policy = load(*args, **options)
        with torch.no_grad():
            policy.model.get_input_embeddings().weight[0, 0] += 1e-6  # type: ignore[union-attr]
        return policy

    if rank:
        trainer.load_policy = load_another
    try:
        return whole_run(given, False, rank, ranks)
    finally:
        trainer.load_policy = load


@pytest.mark.parametrize("trainer", ["single", "fsdp"])
def test_ranks_that_loaded_different_models_are_told_apart_before_the_first_step(
    pair: Pair, trainer: str, tmp_path: Path
) -> None:
    given = tables(tmp_path / "run", {"name": trainer}) | {"runtime": {"ranks": 2}, "engine": {"name": "pool"}}
    error, _ = pair(run_with_another_base, given)
    assert isinstance(error, RankError)
    assert "rank 1 holds other weights than rank 0 after the model was loaded" in str(error)


@pytest.mark.parametrize(("key", "value"), [("use_rslora", True), ("alpha_pattern", {"q_proj": 4})])
def test_an_adapter_of_another_scale_is_refused(key: str, value: Any, first: Path, tmp_path: Path) -> None:
    shutil.copytree(first / "final", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config | {key: value}))
    given = tables(tmp_path / "run", {"name": "single"}, checkpoint={"start_from": str(tmp_path / "adapter")})
    with pytest.raises(InputError, match=f"it has {key} = .* scales every layer by alpha / r"):
        alone(given)


def test_an_adapter_that_does_not_fit_is_refused_by_every_rank(pair: Pair, first: Path, tmp_path: Path) -> None:
    checkpoint = {"start_from": str(first / "final")}
    lora = {"lora": {"targets": ["q_proj"]}}
    with pytest.raises(InputError, match=r"checkpoint\.start_from = .* missing or unknown"):
        on_two(pair, tables(tmp_path / "run", {"name": "fsdp"}, checkpoint=checkpoint, model=lora))
