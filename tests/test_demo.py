"""What `make demo` promises: held-out accuracy from below 0.6 to at least 0.97, both ways. How long it takes is for
benchmarks/demo.py to measure: in a test, whatever else runs decides that."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.commands import podium

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples" / "arithmetic"


def test_make_demo_trains_the_example() -> None:
    done = subprocess.run(
        ["make", "-n", "-B", "demo"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    )
    assert "podium train examples/arithmetic/settings.toml" in done.stdout


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["settings.toml", "full.toml"])
def test_the_demo_learns(name: str, tmp_path: Path) -> None:
    done = podium("train", str(EXAMPLES / name), f"--run.folder={tmp_path / 'run'}", "--json", timeout=1500)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["accuracy_before"] < 0.6
    assert summary["accuracy_after"] >= 0.97
    assert Path(summary["page"]).is_file()
    assert Path(summary["model"]).is_dir()
