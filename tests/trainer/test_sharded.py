"""Trainers that spread their weights over two ranks do what `single` does in one process, and share its checkpoint."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from podium.errors import InputError, TooLargeError
from podium.model.load import load_policy
from podium.records import ReferenceSettings
from podium.settings.lookup import find, option_fields
from podium.settings.tables import Model
from podium.trainer.single import Single
from tests.conftest import RANKS
from tests.trainer.ranks import Pair, sharded_steps, step_without_memory

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "zero-2": ("deepspeed", {"zero": 2}),
    "zero-3": ("deepspeed", {"zero": 3}),
    "zero-2, offload": ("deepspeed", {"zero": 2, "offload": True}),
    "zero-3, offload": ("deepspeed", {"zero": 3, "offload": True}),
}
TOLERANCE = 1e-5
"""On weights after two steps of AdamW at 1e-4: where a gradient is of rounding's size, its sign decides the step."""


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    if request.param != "fsdp" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (extra deepspeed)")
    return KINDS[request.param]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


def on_two(pair: Pair, kind: tuple[str, dict], lora: bool, folder: Path, start: str | None = None) -> dict[str, Any]:
    folder.mkdir()
    results = pair(sharded_steps, *kind, lora, str(folder), start)
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert (
        results[0]["metrics"] == pytest.approx(results[1]["metrics"][0]) or results[0]["state"] == results[1]["state"]
    )
    return results[0]


def alone(lora: bool, folder: Path, start: str | None = None) -> dict[str, Any]:
    folder.mkdir()
    try:
        return sharded_steps("single", {}, lora, str(folder), start)
    finally:
        for name in RANKS:
            os.environ.pop(name, None)


@dataclass(frozen=True)
class Alone:
    """Two steps of one process, and two more from its checkpoint."""

    folder: Path
    first: dict[str, Any]
    go_on: dict[str, Any]


@pytest.fixture(scope="module", params=[True, False], ids=["lora", "full"])
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bool, Alone]:
    """Whether it trains an adapter, and what one process makes of it."""
    lora, folder = request.param, tmp_path_factory.mktemp("alone")
    first = alone(lora, folder / "one")
    go_on = alone(lora, folder / "one-on", str(folder / "one" / "state.safetensors"))
    assert go_on["weights"] != first["weights"]
    return lora, Alone(folder / "one", first, go_on)


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["score"] == pytest.approx(expected["score"], abs=1e-4)
    for part in ("state", "weights"):
        assert found[part].keys() == expected[part].keys()
        for name, values in expected[part].items():
            other = torch.tensor(found[part][name])
            assert torch.allclose(other, torch.tensor(values), rtol=0, atol=TOLERANCE), name
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        for name in theirs:
            if not name.startswith("pack/"):
                assert mine[name] == pytest.approx(theirs[name], abs=1e-5), name


def test_two_ranks_train_as_one_process_and_each_takes_the_others_checkpoint(
    pair: Pair, expected: tuple[bool, Alone], kind: tuple[str, dict], tmp_path: Path
) -> None:
    lora, one = expected
    two = on_two(pair, kind, lora, tmp_path / "two")
    assert_same(two, one.first)
    assert two["offloaded"] == kind[1].get("offload", False)
    assert_same(alone(lora, tmp_path / "two-on-one", str(tmp_path / "two" / "state.safetensors")), one.go_on)
    one_on_two = on_two(pair, kind, lora, tmp_path / "one-on-two", str(one.folder / "state.safetensors"))
    assert_same(one_on_two, one.go_on)
    file = "adapter_model.safetensors" if lora else "model.safetensors"
    written, theirs = (load_file(Path(result["model"]) / file) for result in (two, one.first))
    assert written.keys() == theirs.keys()
    assert all(torch.allclose(written[name], theirs[name], atol=TOLERANCE) for name in theirs)


@pytest.mark.parametrize(
    ("name", "own", "options"),
    [
        ("fsdp", {}, {"reference": ReferenceSettings()}),
        ("fsdp", {}, {"precision": "bfloat16"}),
        ("deepspeed", {"zero": 3}, {"precision": "bfloat16"}),
    ],
    ids=["fsdp, reference", "fsdp, bfloat16", "zero-3, bfloat16"],
)
def test_so_they_do_beside_a_reference_and_in_half_precision(
    pair: Pair, name: str, own: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (extra deepspeed)")
    whole = on_two(pair, ("single", options), False, tmp_path / "whole")  # on two as well: batches of the same shapes
    assert_same(on_two(pair, (name, own | options), False, tmp_path / "spread"), whole)


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_out_of_memory_ends_the_run_where_a_pass_cannot_begin_again(name: str, tmp_path: Path) -> None:
    if name == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (extra deepspeed)")
    assert step_without_memory("single", {})["optim/grad_norm"] > 0
    pair = Pair(tmp_path)
    try:
        for result in pair(step_without_memory, name, {}):
            assert isinstance(result, TooLargeError)
            assert "lower pack.max_tokens_per_batch" in str(result)
    finally:
        pair.close()


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
def test_one_process_is_told_to_use_single(name: str) -> None:
    policy = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    with pytest.raises(InputError, match=r"is for several ranks; set runtime\.ranks, or use 'single'"):
        find("trainer", name)(policy, None, 1, lr=1e-5)


def test_every_trainer_has_the_options_of_single() -> None:
    mine = option_fields(Single)
    assert option_fields(find("trainer", "fsdp")) == mine
    of_deepspeed = option_fields(find("trainer", "deepspeed"))
    assert {**mine, "zero": of_deepspeed["zero"], "offload": of_deepspeed["offload"]} == of_deepspeed
