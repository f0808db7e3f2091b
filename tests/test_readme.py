"""What the pages link to and explain exists. That their commands work is in test_docs.py."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_file_that_the_pages_link_to_exists() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_every_reward_is_in_the_table_of_verifiers() -> None:
    from podium.settings.lookup import choices

    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "verifiers.md").read_text(), re.MULTILINE)
    assert sorted(listed) == choices("reward")


def test_every_metric_that_a_run_writes_is_explained(tmp_path: Path) -> None:
    import json

    from podium.run.start import train
    from podium.settings.tables import Settings
    from tests.conftest import small_tables

    tables = small_tables(tmp_path / "run", steps=1)
    tables["eval"] = {"data": [{"name": "arithmetic", "split": "held_out", "max_rows": 4}]}
    train(Settings.from_dict(tables))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    written = {name for line in lines for name in line if "/" in name}
    explained = (ROOT / "docs" / "metrics.md").read_text()
    missing = {name for name in written if f"`{name}`" not in explained} - {
        "reward/arithmetic_mean",
        "reward/kept_arithmetic_mean",
        "eval/verifier/arithmetic",
    }
    assert not missing


def test_the_table_and_the_picture_of_speed_are_what_was_measured() -> None:
    import subprocess
    import sys

    command = [sys.executable, str(ROOT / "benchmarks" / "picture.py"), "--check"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
