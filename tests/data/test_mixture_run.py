"""A mixture in a real run: its order survives a resume."""

import json
from pathlib import Path
from typing import Any

from podium.data.arithmetic import arithmetic
from podium.records import Row
from podium.run.folder import RunFolder
from podium.run.start import resume, train
from podium.settings.tables import Settings
from tests.conftest import small_tables


def drawn(folder: Path) -> list[tuple[int, str, str]]:
    """Ordinal, question and answer text of every rollout, in the ledger's order."""
    paths = sorted((folder / "rollouts").iterdir())
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return [(line["ordinal"], line["prompt"], line["text"]) for line in lines]


def differences() -> list[Row]:
    return arithmetic("-")


def mixed(folder: Path, **run: Any) -> Settings:
    tables = small_tables(folder, **run)
    tables["data"] = [
        {"name": "sums", "max_rows": 5, "weight": 1},
        {"name": "tests.data.test_mixture_run:differences", "max_rows": 4, "weight": 2},
    ]
    return Settings.from_dict(tables)


def test_a_resumed_run_draws_what_the_unbroken_one_draws(tmp_path: Path) -> None:
    train(mixed(tmp_path / "whole", steps=6))
    train(mixed(tmp_path / "parts", steps=2))
    resume(mixed(tmp_path / "parts", steps=6), RunFolder.open(tmp_path / "parts"))
    whole = drawn(tmp_path / "whole")
    assert drawn(tmp_path / "parts") == whole
    # a pass has 9 prompts, 3 sums and 6 differences; 6 steps of 4 prompts are two passes and 6 more
    by_ordinal = {ordinal: prompt for ordinal, prompt, _ in whole}
    assert sorted(by_ordinal) == list(range(24))
    for begin in (0, 9):
        assert sum("+" in by_ordinal[ordinal] for ordinal in range(begin, begin + 9)) == 3
