"""The four checks that are always on: each real part is broken through the command line and the error names it."""

import json
from pathlib import Path

import pytest
import tomli_w

from podium.cli import main
from tests.conftest import small_tables

BREAKS = {
    "stale weights": ({"engine": "StaleEngine"}, "StaleEngine does not sample from the trained weights"),
    "stale full weights": ({"engine": "StaleEngine", "full": True}, "does not sample from the trained weights"),
    "adapter off": ({"engine": "AdapterOffEngine"}, "AdapterOffEngine does not sample from the trained weights"),
    "version not moved": ({"engine": "OldVersionEngine"}, "holds policy version 0 after version 1 was pushed"),
    "wrong denominator": ({"loss": "own_denominator"}, "divide by batch.num_loss_tokens"),
    "re-encoded ids": ({"rollout": "ReencodingRollout"}, "are not the ones sampled"),
    "reward out of contract": ({"reward": "lying_reward"}, "returned nan; return a finite number"),
}


def settings_file(tmp_path: Path, broken: dict) -> Path:
    tables = small_tables(tmp_path / "run", steps=30)
    for section, name in broken.items():
        if section == "reward":
            tables["reward"] = [{"name": f"tests.broken:{name}"}]
        elif section == "full":  # a snapshot engine: full weights that are shared cannot be stale
            tables["model"]["lora"] = False
            tables["run"]["sync_every"] = 2
        else:
            tables.setdefault(section, {})["name"] = f"tests.broken:{name}"
    path = tmp_path / "settings.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


@pytest.mark.parametrize("kind", BREAKS)
def test_a_broken_part_stops_the_run_with_its_name(kind: str, tmp_path: Path, capsys) -> None:
    broken, message = BREAKS[kind]
    assert main(["train", str(settings_file(tmp_path, broken))]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_the_same_settings_with_nothing_broken_run_through(tmp_path: Path) -> None:
    assert main(["train", str(settings_file(tmp_path, {})), "--run.steps=3"]) == 0
