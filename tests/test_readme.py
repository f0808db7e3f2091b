"""The README's commands, run as they stand, in its order."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMAND = re.compile(r"^podium .*$", re.MULTILINE)
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)


def commands(page: Path) -> list[str]:
    return [line for block in BLOCK.findall(page.read_text()) for line in COMMAND.findall(block)]


def test_the_readme_has_commands_to_run() -> None:
    assert len(commands(ROOT / "README.md")) >= 6


@pytest.mark.timeout(600)
def test_the_readmes_commands_work_in_their_order(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for command in commands(ROOT / "README.md"):
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


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
    from podium.lookup import choices

    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "verifiers.md").read_text(), re.MULTILINE)
    assert sorted(listed) == choices("reward")


def test_every_metric_that_a_run_writes_is_explained(tmp_path: Path) -> None:
    import json

    from podium.run import train
    from podium.settings import Settings
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
