"""Damage is found by its hash; the previous checkpoint is used, or the run stops: it is never started over."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from podium.cli import main
from podium.errors import CheckpointError
from podium.model.load import model_folder
from podium.run import checkpoint
from podium.run.checkpoint import find_damage
from podium.run.start import train
from podium.settings.tables import Settings
from tests.conftest import small_tables


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps with commits at 2 and 4."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(Settings.from_dict(small_tables(folder)))
    return folder


@pytest.fixture
def finished(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be extended and damaged."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-000004"


DAMAGES = {
    "flipped bit": lambda place: flip_a_bit(place / "trainer.safetensors"),
    "truncated": lambda place: (place / "trainer.safetensors").write_bytes(
        (place / "trainer.safetensors").read_bytes()[:-7]
    ),
    "missing file": lambda place: (place / "state.json").unlink(),
    "missing manifest": lambda place: (place / "manifest.json").unlink(),
    "garbage manifest": lambda place: (place / "manifest.json").write_text("{]"),
    "manifest of another kind": lambda place: (place / "manifest.json").write_text("[1]"),
    "empty manifest": lambda place: (place / "manifest.json").write_text("{}"),
}


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(kind: str, finished: Path, capsys) -> None:
    DAMAGES[kind](newest(finished))
    assert main(["resume", str(finished), "--run.steps=5"]) == 0
    assert "step-000004 is damaged" in capsys.readouterr().err
    events = [json.loads(line) for line in (finished / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "restored"] == [2]


def test_a_damaged_checkpoint_that_was_named_is_not_replaced_by_another(finished: Path, capsys) -> None:
    flip_a_bit(newest(finished) / "trainer.safetensors")
    assert main(["resume", str(finished), "--step", "4", "--run.steps=5"]) == 1
    assert "trainer.safetensors is not what was written" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_over(finished: Path, capsys) -> None:
    for place in (finished / "checkpoints").iterdir():
        flip_a_bit(place / "trainer.safetensors")
    assert main(["resume", str(finished), "--run.steps=5"]) == 1
    assert "the run does not start over" in capsys.readouterr().err


def test_a_run_whose_checkpoints_are_gone_is_not_started_over(finished: Path, capsys) -> None:
    before = (finished / "metrics.jsonl").read_text()
    shutil.rmtree(finished / "checkpoints")
    assert main(["resume", str(finished), "--run.steps=5"]) == 1
    assert "have been deleted; the run does not start over" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_text() == before


def test_a_checkpoint_folder_that_cannot_be_read_is_an_error(finished: Path, capsys, monkeypatch) -> None:
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("podium.run.checkpoint.os.scandir", refuse)
    assert main(["resume", str(finished), "--run.steps=5"]) == 1
    assert "cannot be read: Permission denied" in capsys.readouterr().err


def test_going_back_to_an_older_checkpoint_sets_the_newer_ones_aside(finished: Path) -> None:
    assert main(["resume", str(finished), "--step", "2", "--run.steps=3"]) == 0
    names = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert names[-2:] == ["step-000002", "step-000003"]
    assert [name.startswith("aside-step-000004-") for name in names] == [True, False, False]


def test_killed_while_going_back_the_next_resume_still_works(finished: Path, monkeypatch) -> None:
    """The newer checkpoint is set aside before the ledger is cut."""

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    monkeypatch.setattr("podium.run.folder.os.truncate", kill)
    with pytest.raises(Killed):
        main(["resume", str(finished), "--step", "2", "--run.steps=5"])
    monkeypatch.undo()
    assert main(["resume", str(finished), "--run.steps=5"]) == 0


def test_fewer_steps_than_the_run_has_are_refused(finished: Path, capsys) -> None:
    assert main(["resume", str(finished), "--run.steps=1"]) == 2
    assert "the run has 4 steps already" in capsys.readouterr().err


def test_another_adapter_shape_is_refused(finished: Path, capsys) -> None:
    assert main(["resume", str(finished), "--model.lora.r=8", "--allow-change", "model.lora.r", "--run.steps=5"]) == 1
    assert "other weights than this model trains" in capsys.readouterr().err


def test_a_full_disk_leaves_the_checkpoints_before_it_and_no_rubbish(tmp_path: Path, capsys, monkeypatch) -> None:
    real = checkpoint.save_file

    def full(tensors, path):
        if "step-000004" in str(path):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        real(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        train(Settings.from_dict(small_tables(tmp_path / "run")))
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert names == ["step-000002"]
    assert find_damage(tmp_path / "run" / "checkpoints" / "step-000002") is None


def test_a_changed_ledger_is_found_and_nothing_is_cut(finished: Path, capsys) -> None:
    lines = (finished / "metrics.jsonl").read_text().replace('"step":1', '"step":7')
    (finished / "metrics.jsonl").write_text(lines)
    assert main(["resume", str(finished), "--run.steps=5"]) == 1
    assert "was changed or deleted since the checkpoint" in capsys.readouterr().err
    assert (finished / "metrics.jsonl").read_text() == lines


def test_a_deleted_ledger_is_found(finished: Path, capsys) -> None:
    (finished / "metrics.jsonl").unlink()
    assert main(["resume", str(finished), "--run.steps=5"]) == 1
    assert "metrics.jsonl or rollouts/ in" in (told := capsys.readouterr().err)
    assert "was changed or deleted since the checkpoint; restore those files, or start a new run" in told
    assert not (finished / "metrics.jsonl").exists()


def test_leftovers_of_a_killed_write_are_cleaned_up(finished: Path) -> None:
    (finished / "checkpoints" / "step-000006.tmp-1").mkdir()
    assert main(["resume", str(finished), "--run.steps=5"]) == 0
    assert not list((finished / "checkpoints").glob("*.tmp-*"))


def test_only_as_many_checkpoints_stay_as_are_kept(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run", steps=5)
    tables["checkpoint"] = {"every": 1, "keep": 2}
    train(Settings.from_dict(tables))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000004", "step-000005"]


def test_without_checkpoints_in_between_the_end_is_still_committed(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run", steps=3)
    tables["checkpoint"] = {"every": 0}
    train(Settings.from_dict(tables))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000003"]
    assert find_damage(tmp_path / "run" / "checkpoints" / "step-000003") is None


def test_other_data_is_refused(finished: Path, capsys) -> None:
    changed = ["--data.0.name=sums", "--allow-change", "data.0.name", "--run.steps=5"]
    assert main(["resume", str(finished), *changed]) == 2
    assert "the data is not what this run was trained on" in capsys.readouterr().err


def test_the_trained_adapter_folder_holds_two_files_and_nothing_else(finished: Path) -> None:
    assert sorted(path.name for path in (finished / "final").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def rewrite_state(place: Path, saved: dict[str, Any]) -> None:
    """With a manifest that fits."""
    path, manifest = place / "state.json", place / "manifest.json"
    path.write_text(json.dumps(saved))
    files = json.loads(manifest.read_text()) | {"state.json": checkpoint.describe_file(path)}
    manifest.write_text(json.dumps(files, indent=1))


def test_a_checkpoint_from_before_prompts_could_be_pending_is_restored(finished: Path) -> None:
    saved = json.loads((newest(finished) / "state.json").read_text())
    assert saved["state"].pop("pending") == []
    rewrite_state(newest(finished), saved)
    assert main(["resume", str(finished), "--run.steps=5"]) == 0
    events = [json.loads(line) for line in (finished / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "restored"] == [4]


def test_what_was_written_is_compared_with_what_was_meant(tmp_path: Path) -> None:
    """Any byte of the tensors, their names and their shapes; a NaN and an empty tensor are equal to themselves."""
    nan = float("nan")
    tensors = {"a": torch.tensor([1.0, nan, -0.0]), "b": torch.tensor([], dtype=torch.float64), "c": torch.tensor(7)}
    place = tmp_path / "checkpoints" / "step-000001"
    checkpoint.write_checkpoint(place, tensors, {"state": {}}, "", [])
    assert checkpoint.find_difference(place, tensors) is None
    others = {
        "is not what was written": tensors | {"a": torch.tensor([1.0, nan, 0.0])},
        "holds other tensors": {"a": tensors["a"], "b": tensors["b"]},
        "has another shape": tensors | {"c": torch.tensor([7])},
    }
    for complaint, meant in others.items():
        assert complaint in (checkpoint.find_difference(place, meant) or "")
    flip_a_bit(place / "state.json")
    assert checkpoint.find_difference(place, tensors) == "state.json is not what was written"


@pytest.mark.parametrize("shift", [-1_000_000_000, 1_000_000_000])
def test_a_header_that_points_outside_of_its_file_is_a_difference(shift: int, tmp_path: Path) -> None:
    """And no read of memory that is not the file's."""
    tensors = {"a": torch.ones(1000)}
    place = tmp_path / "checkpoints" / "step-000001"
    checkpoint.write_checkpoint(place, tensors, {"state": {}}, "", [])
    file, manifest = place / checkpoint.TENSORS, place / checkpoint.MANIFEST
    header = {"a": {"dtype": "F32", "shape": [1000], "data_offsets": [shift, shift + 4000]}}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4000)
    described = json.loads(manifest.read_text())
    described[checkpoint.TENSORS]["bytes"] = file.stat().st_size
    manifest.write_text(json.dumps(described))
    assert checkpoint.find_difference(place, tensors) == "a in trainer.safetensors is not what was written"


def warned(capsys) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: trainer.lr changes")]


def test_each_new_value_of_a_setting_is_warned_of_once(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    train(Settings.from_dict(small_tables(run, steps=1)))
    for steps, rate in enumerate(("1e-3", "1e-1", "1e-3"), 2):
        capsys.readouterr()
        assert main(["resume", str(run), f"--run.steps={steps}", f"--trainer.lr={rate}"]) == 0
        [line] = warned(capsys)
        assert f"to {float(rate)!r}: from here on it is not the run it was" in line
    assert main(["resume", str(run), "--run.steps=5"]) == 0
    assert warned(capsys) == []


def test_a_change_that_was_insisted_on_allows_no_other_value(tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    train(Settings.from_dict(small_tables(run, steps=1)))
    insist = ["--allow-change", "loss.clip"]
    assert main(["resume", str(run), "--run.steps=2", "--loss.clip=0.3", *insist]) == 0
    edited = (run / "settings.toml").read_text().replace("clip = 0.3", "clip = 0.4")
    assert "clip = 0.4" in edited
    (run / "settings.toml").write_text(edited)
    assert main(["resume", str(run), "--run.steps=3"]) == 2
    assert "loss.clip cannot change on resume" in capsys.readouterr().err
    assert main(["resume", str(run), "--run.steps=3", *insist]) == 0  # the edited file counts as a change
    assert main(["resume", str(run), "--step=2", "--run.steps=4"]) == 0  # and is accepted as often as it is needed


def a_base(tmp_path: Path) -> Path:
    """The embedded model as a folder of one's own."""
    return shutil.copytree(model_folder("embedded"), tmp_path / "base")


def change_a_weight(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    tensors[name][0, 0] += 1e-3
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def test_an_adapter_does_not_go_on_over_other_base_weights(tmp_path: Path, capsys) -> None:
    run, base = tmp_path / "run", a_base(tmp_path)
    model = {"name": str(base), "device": "cpu"}
    train(Settings.from_dict(small_tables(run, steps=1) | {"model": model}))
    assert main(["resume", str(run), "--run.steps=2"]) == 0  # the same weights, read again
    change_a_weight(base)
    assert main(["resume", str(run), "--run.steps=3"]) == 2
    assert "the base weights are not those that this run's adapter was trained on" in capsys.readouterr().err
    place = run / "checkpoints" / "step-000002"
    saved = json.loads((place / "state.json").read_text())
    del saved["base_digest"]
    rewrite_state(place, saved)
    assert main(["resume", str(run), "--run.steps=3"]) == 0  # a checkpoint from before the digest was kept


def test_full_weights_are_in_the_checkpoint_so_the_base_does_not_count(tmp_path: Path) -> None:
    run, base = tmp_path / "run", a_base(tmp_path)
    model = {"name": str(base), "device": "cpu", "lora": False}
    train(Settings.from_dict(small_tables(run, steps=1) | {"model": model}))
    change_a_weight(base)
    assert main(["resume", str(run), "--run.steps=2"]) == 0
