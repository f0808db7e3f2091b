"""Weights through a folder: what went in comes out, and nothing that is damaged does."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from podium.errors import WeightsError
from podium.model.handoff import (
    manifest_of,
    pack_published,
    publish,
    read_manifest,
    read_published,
    remove_published,
    unpack_published,
)
from podium.model.load import Policy, load_policy
from podium.settings.sections import Model


@pytest.fixture(scope="module", params=[True, False], ids=["lora", "full"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return load_policy(Model.model_validate({"device": "cpu"} | ({} if request.param else {"lora": False})), seed=0)


def published(policy: Policy, root: Path) -> Path:
    return publish(root, policy, policy.named_weights(), 3)


def read(policy: Policy, folder: Path, version: int = 3) -> dict[str, torch.Tensor]:
    return read_published(folder, dict(policy.named_weights()), version)


def test_what_was_published_is_read_back_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    found = read(policy, published(policy, tmp_path))
    expected = dict(policy.named_weights())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_adapter_folder_holds_what_peft_loads_and_nothing_else(tmp_path: Path) -> None:
    policy = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    folder = published(policy, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    again = load_policy(Model.model_validate({"device": "cpu"}), seed=1, weights=folder)
    for (name, mine), (_, theirs) in zip(policy.named_weights(), again.named_weights(), strict=True):
        assert torch.equal(mine, theirs), name


def test_two_publications_of_one_version_do_not_meet(policy: Policy, tmp_path: Path) -> None:
    first, second = published(policy, tmp_path), published(policy, tmp_path)
    assert first != second
    remove_published(first)
    read(policy, second)
    assert sorted(path.name for path in tmp_path.iterdir()) == [second.name, f"{second.name}.json"]


def weights_file(folder: Path) -> Path:
    [path] = folder.glob("*.safetensors")
    return path


def rewrite(folder: Path, change) -> None:
    """Other tensors under a manifest that fits them."""
    path = weights_file(folder)
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    from podium.model.handoff import _described

    manifest = json.loads(manifest_of(folder).read_text())
    manifest["files"][path.name] = _described(path)
    manifest_of(folder).write_text(json.dumps(manifest))


def flip_a_bit(folder: Path) -> None:
    path = weights_file(folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def one_nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values())).view(-1)[0] = float("nan")


def a_row_less(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name][1:].clone()


def one_less(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(next(iter(tensors)))


def integers(tensors: dict[str, torch.Tensor]) -> None:
    name = next(iter(tensors))
    tensors[name] = tensors[name].to(torch.int32)


def a_link(folder: Path) -> None:
    path = weights_file(folder)
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


DAMAGES = {
    "a bit": (flip_a_bit, "not what was written"),
    "cut off": (lambda folder: os.truncate(weights_file(folder), 1000), "not what was"),
    "file gone": (lambda folder: weights_file(folder).unlink(), "missing"),
    "a link": (a_link, "missing or not"),
    "no manifest": (lambda folder: manifest_of(folder).unlink(), "there are no weights called"),
    "manifest cut": (lambda folder: manifest_of(folder).write_text('{"version": 3'), "cannot be read"),
    "manifest of another kind": (lambda folder: manifest_of(folder).write_text("[]"), "cannot be read"),
    "nan": (lambda folder: rewrite(folder, one_nan), "not finite numbers"),
    "shape": (lambda folder: rewrite(folder, a_row_less), "has the shape"),
    "tensor gone": (lambda folder: rewrite(folder, one_less), "missing or unknown"),
    "integers": (lambda folder: rewrite(folder, integers), "not finite numbers"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name(policy: Policy, tmp_path: Path, damage: str) -> None:
    folder = published(policy, tmp_path)
    spoil, complaint = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(WeightsError, match=complaint):
        read(policy, folder)


def test_another_version_than_the_one_asked_for_is_refused(policy: Policy, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="holds version 3, not 4"):
        read(policy, published(policy, tmp_path), version=4)


def test_a_published_folder_goes_through_a_crate_unchanged(policy: Policy, tmp_path: Path) -> None:
    folder = published(policy, tmp_path / "here")
    crate = pack_published(folder)
    there = unpack_published(crate, tmp_path / "there")
    assert there.name == folder.name
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }
    assert read_manifest(there) == read_manifest(folder)
    [file] = folder.glob("*.safetensors")
    assert crate.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert list(read(policy, there)) == [name for name, _ in policy.named_weights()]
