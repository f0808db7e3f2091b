"""Weights by id: nothing outside the root, nothing damaged, nothing pickled; the old ones go on answering."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from podium.model.handoff import manifest_of, publish
from podium.model.load import Policy, load_policy
from podium.server.door import Refusal
from podium.server.served import locate
from podium.settings.sections import Model
from tests.server.serving import Running
from tests.server.test_abuse import Canary
from tests.test_files import put_socket


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    tables: dict[str, Any] = {"adapter": {"r": 4}, "other adapter": {"r": 2, "targets": ["q_proj"]}, "full": False}
    return {
        kind: load_policy(Model.model_validate({"device": "cpu", "lora": table}), seed=0)
        for kind, table in tables.items()
    }


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


def published(root: Path, policy: Policy, version: int, seed: int = 0, scale: float = 0.05) -> Path:
    generator = torch.Generator().manual_seed(seed)
    moved = [(name, t + scale * torch.randn(t.shape, generator=generator)) for name, t in policy.named_weights()]
    return publish(root, policy, moved, version)


def answer(client: httpx.Client) -> dict[str, Any]:
    response = client.post("/generate", json={"prompt_token_ids": [1, 5, 9, 11], "max_tokens": 8, "seeds": [1, 2]})
    assert response.status_code == 200, response.text
    return response.json()


def reload(client: httpx.Client, folder: Path | str, version: int, **others: Any) -> httpx.Response:
    name = folder if isinstance(folder, str) else folder.name
    return client.post("/reload_weights", json={"id": name, "version": version, **others})


def rewrite_manifest(folder: Path) -> None:
    """As one who can write the root would: the damage has the right hash."""
    manifest = json.loads(manifest_of(folder).read_text())
    manifest["files"] = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
    }
    manifest_of(folder).write_text(json.dumps(manifest))


def change_tensors(folder: Path, change: Any) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    name = sorted(tensors)[0]
    save_file(tensors | {name: change(tensors[name])}, path)
    rewrite_manifest(folder)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed[0, 0] = torch.nan
    return changed


def put_pickle_in(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    rewrite_manifest(folder)


def flip_a_bit(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    rewrite_manifest(folder)


def make_fifo(path: Path) -> None:
    """Whoever opens it to read waits for a writer."""
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Any] = {
    "a flipped bit": flip_a_bit,
    "cut short": lambda folder: os.truncate(folder / "adapter_model.safetensors", 1000),
    "cut short, with the right hash": lambda folder: (
        os.truncate(folder / "adapter_model.safetensors", 1000),
        rewrite_manifest(folder),
    ),
    "NaN": lambda folder: change_tensors(folder, with_nan),
    "infinite": lambda folder: change_tensors(folder, lambda t: torch.full_like(t, torch.inf)),
    "another shape": lambda folder: change_tensors(folder, lambda t: t[:, :-1].contiguous()),
    "integers": lambda folder: change_tensors(folder, lambda t: t.to(torch.int32)),
    "a .bin instead": put_pickle_in,
    "no manifest": lambda folder: manifest_of(folder).unlink(),
    "a manifest of lists": lambda folder: manifest_of(folder).write_text("[" * 100_000),
    "a huge manifest": lambda folder: manifest_of(folder).write_text(" " * (2 << 20)),
    "a linked file": lambda folder: (
        shutil.move(folder / "adapter_model.safetensors", folder.parent.parent / "elsewhere"),
        (folder / "adapter_model.safetensors").symlink_to(folder.parent.parent / "elsewhere"),
    ),
    "a huge rank": lambda folder: edit_config(folder, r=10**9),
    "a rank that is not the tensors'": lambda folder: edit_config(folder, r=3),
    "a variant of LoRA": lambda folder: edit_config(folder, use_rslora=True),
    "a rank by layer": lambda folder: edit_config(folder, rank_pattern={"q_proj": 2}),
    "targets by pattern": lambda folder: edit_config(folder, target_modules="(a+)+$"),
    "targets that are not there": lambda folder: edit_config(folder, target_modules=["nothing_proj"]),
    "gone": shutil.rmtree,
    "a FIFO as the manifest": lambda folder: make_fifo(manifest_of(folder)),
    "a FIFO as the configuration": lambda folder: make_fifo(folder / "adapter_config.json"),
    "a FIFO as the tensors": lambda folder: make_fifo(folder / "adapter_model.safetensors"),
    "a folder as the manifest": lambda folder: (manifest_of(folder).unlink(), manifest_of(folder).mkdir()),
    "a socket as the manifest": lambda folder: (manifest_of(folder).unlink(), put_socket(manifest_of(folder))),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_weights_are_refused_and_the_old_ones_answer_as_before(
    damage: str, server: Running, client: httpx.Client, policies: dict[str, Policy]
) -> None:
    good = published(server.root, policies["adapter"], 7)
    assert reload(client, good, 7).status_code == 200
    before = answer(client)
    assert before["policy_version"] == 7
    folder = published(server.root, policies["adapter"], 8, seed=1)
    DAMAGE[damage](folder)
    refused = reload(client, folder, 8)
    assert refused.status_code in (403, 404, 422), refused.text
    assert str(server.root) not in refused.text
    assert answer(client) == before


def test_the_version_must_be_what_was_published(
    server: Running, client: httpx.Client, policies: dict[str, Policy]
) -> None:
    folder = published(server.root, policies["adapter"], 3)
    assert reload(client, folder, 4).status_code == 422
    assert reload(client, folder, 3).json()["version"] == 3


def test_a_server_takes_adapters_of_any_rank_and_full_weights_in_turn(
    server: Running, client: httpx.Client, policies: dict[str, Policy]
) -> None:
    answers = []
    for version, kind in enumerate(["adapter", "other adapter", "full", "adapter"], 10):
        taken = reload(client, published(server.root, policies[kind], version, scale=0.2), version)
        assert taken.status_code == 200, taken.text
        assert len(taken.json()["sha256"]) == 64
        answers.append(answer(client))
        assert answers[-1]["policy_versions"] == [[version, version]] * 2
    bare = [each["logprobs"] for each in answers]
    assert bare[0] == bare[3]  # the same adapter over the same base, whatever was in between
    assert bare[0] != bare[1] != bare[2]


BAD_IDS = [
    "../root",
    "..",
    ".",
    "/etc",
    "/",
    "a/b",
    "..%2f..%2fetc",
    "file:///etc/passwd",
    "http://host/weights",
    "//host/share",
    "a\0b",
    "a" * 10_000,
    "",
    "nothing",
    "~root",
    "C:\\weights",
    "a\n",
    "link",
]


@pytest.mark.parametrize("name", BAD_IDS, ids=lambda name: repr(name)[:20])
def test_no_id_leads_out_of_the_root(
    name: str, server: Running, client: httpx.Client, policies: dict[str, Policy], tmp_path: Path
) -> None:
    outside = published(tmp_path, policies["adapter"], 5)
    for link, target in ((server.root / "link", outside), (server.root / "link.json", manifest_of(outside))):
        if not link.is_symlink():
            link.symlink_to(target)
    before = answer(client)
    refused = reload(client, name, 5)
    assert refused.status_code in (403, 404, 422)
    assert "Traceback" not in refused.text
    assert str(tmp_path) not in refused.text
    assert answer(client) == before
    for link in server.root.glob("link*"):
        link.unlink()


@given(st.text(max_size=40))
@example("/")
@example("..")
def test_any_id_is_under_the_root_or_refused(name: str) -> None:
    root = Path("/nowhere/podium-root")
    if "\0" in name:
        return  # refused by its pattern; a path cannot hold it
    with pytest.raises((Refusal, OSError)):
        locate(root, name or ".")


def test_a_pickle_is_never_opened(
    server: Running, client: httpx.Client, policies: dict[str, Policy], tmp_path: Path
) -> None:
    """Wherever weights or a field could be, on every route."""
    trace = tmp_path / "opened"
    canary = pickle.dumps(Canary(trace))
    for name in ("adapter_model.safetensors", "adapter_model.bin", "adapter_config.json", "training_args.bin"):
        folder = published(server.root, policies["adapter"], 6)
        (folder / name).write_bytes(canary)
        rewrite_manifest(folder)
        reload(client, folder, 6)
    for route in ("/generate", "/score", "/reload_weights", "/claim", "/release"):
        for kind in ("application/json", "application/octet-stream", "application/x-python-pickle"):
            assert client.post(route, content=canary, headers={"content-type": kind}).status_code in (400, 415)
    assert not trace.exists()
    pickle.loads(canary)  # the canary does sing
    assert trace.exists()
