"""G11, D2, D3, D7: damage of any kind is found; what cannot be read is never taken for "no checkpoint"."""

import json
import random
import shutil
from pathlib import Path

import pytest

from podium.errors import CheckpointError
from podium.run.checkpoint import FORMAT, find_damage
from tests.chaos.harness import ChaosJobs, events, tiny_tables, write_tables
from tests.chaos.mini import make_run, restored

FLIPS = 1000


@pytest.fixture(scope="module")
def real(shared_server: ChaosJobs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run with two checkpoints."""
    folder = tmp_path_factory.mktemp("real") / "run"
    assert shared_server.run("train", write_tables(tiny_tables(folder, steps=2))) == 0, shared_server.log
    return folder


def test_g11_a_thousand_flipped_bits_and_cut_files_are_all_found(real: Path) -> None:
    """Over all files of a checkpoint, each as likely as the others: most bytes are tensors."""
    rng = random.Random(11)
    place = real / "checkpoints" / "step-000002"
    files = sorted(place.iterdir())
    assert {path.name for path in files} == {"manifest.json", "settings.toml", "state.json", "trainer.safetensors"}
    found = 0
    for _ in range(FLIPS):
        path = rng.choice(files)
        good = path.read_bytes()
        if rng.random() < 0.8:
            bad = bytearray(good)
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        else:
            bad = good[: rng.randrange(len(good))]
        assert bytes(bad) != good
        path.write_bytes(bytes(bad))
        found += find_damage(place) is not None
        path.write_bytes(good)
    assert found == FLIPS
    assert find_damage(place) is None


def test_g11_a_changed_ledger_is_found_too(tmp_path: Path) -> None:
    rng = random.Random(12)
    make_run(str(tmp_path / "run"), 3)
    files = [tmp_path / "run" / "metrics.jsonl", *sorted((tmp_path / "run" / "rollouts").iterdir())]
    for _ in range(100):
        path = rng.choice(files)
        good = path.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(bad))
        with pytest.raises(CheckpointError, match="was changed or deleted since the checkpoint"):
            restored(tmp_path / "run")
        path.write_bytes(good)
    assert restored(tmp_path / "run") == (3, 3.0, [1, 2, 3])


def test_d2_a_damaged_newest_one_is_told_and_the_one_before_taken(
    server: ChaosJobs, real: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(real, run)
    path = run / "checkpoints" / "step-000002" / "trainer.safetensors"
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(bytes(data))
    assert server.run("resume", str(run), "--step", "2", "--run.steps=3") == 1
    assert "trainer.safetensors is not what was written" in server.log
    assert server.run("resume", str(run), "--run.steps=3") == 0
    assert [event["step"] for event in events(run, "restored")] == [1]
    assert [event["checkpoint"] for event in events(run, "damaged_checkpoint")] == ["step-000002"]


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "trainer.safetensors"])
def test_d3_a_file_that_cannot_be_read_is_an_error_and_not_a_new_start(name: str, tmp_path: Path) -> None:
    """A file at whose first byte the system itself says EIO."""
    make_run(str(tmp_path / "run"), 2)
    path = tmp_path / "run" / "checkpoints" / "step-000002" / name
    path.unlink()
    path.symlink_to("/proc/self/mem")
    with pytest.raises(CheckpointError, match="cannot be read: Input/output error"):
        restored(tmp_path / "run")


def test_d7_a_checkpoint_of_format_1_is_read(tmp_path: Path) -> None:
    """As the first version of Podium wrote it: without settings and without a number of restarts."""
    shutil.copytree(Path(__file__).parent / "format_1", tmp_path / "run")
    assert json.loads((tmp_path / "run/checkpoints/step-000002/state.json").read_text())["format"] == 1
    assert restored(tmp_path / "run") == (2, 2.0, [1, 2])


def test_d7_a_checkpoint_of_a_later_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    make_run(str(tmp_path / "run"), 1)
    place = tmp_path / "run" / "checkpoints" / "step-000001"
    state = place / "state.json"
    state.write_text(state.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    from podium.run.checkpoint import describe_file

    manifest = {name: describe_file(place / name) for name in ("settings.toml", "state.json", "trainer.safetensors")}
    (place / "manifest.json").write_text(json.dumps(manifest, indent=1))
    with pytest.raises(CheckpointError, match=rf"has format {FORMAT + 1}; .* reads formats 1 to {FORMAT}"):
        restored(tmp_path / "run")
