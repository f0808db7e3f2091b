"""Settings that must reach the stages of a real run."""

import json
from pathlib import Path
from typing import Any

from podium.run import train
from podium.settings import Settings
from tests.conftest import small_tables


def rollouts_of(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "rollouts").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_penalty_of_the_settings_reaches_the_rewards(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run", steps=1)
    tables["rollout"]["max_new_tokens"] = 16  # some answers of this model are longer, some are not
    tables["scoring"] = {"non_stop_penalty": -3.0}
    train(Settings.from_dict(tables))
    by_end = {"stop": set(), "length": set()}
    for line in rollouts_of(tmp_path / "run"):
        by_end[line["finish_reason"]].add(line["reward"])
    assert by_end["length"] == {-3.0}
    assert by_end["stop"]
    assert -3.0 not in by_end["stop"]
