"""Two runs of one seed, in two processes whose sets have another order, write the same bytes, times aside."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from podium.run.folder import RunFolder

EXAMPLE = Path(__file__).parent.parent / "examples" / "arithmetic" / "settings.toml"
SIZES = ["--run.steps=2", "--run.prompts_per_step=4", "--data.max_rows=1000", "--eval.data.max_rows=8"]
FLAGS = [*SIZES, "--checkpoint.every=1"]
TIMES = re.compile(r"(^time/|_s$|^bytes$|^metrics_bytes$|sha256)")
"""Keys of times, and of lengths and hashes of files that hold times."""
ALL_TIMES = {"events.jsonl", "status.json", "lock"}


def run(folder: Path, hash_seed: str) -> Path:
    command = [sys.executable, "-m", "podium.cli", "train", str(EXAMPLE), f"--run.folder={folder}", "--quiet", *FLAGS]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder


def told(path: Path, folder: Path) -> object:
    """What a file says, without times and without its own place."""
    if path.suffix not in (".json", ".jsonl", ".toml"):
        return path.read_bytes()
    text = path.read_text().replace(str(folder), "RUN")
    if path.suffix != ".jsonl":
        return _plain(text)
    return [_timeless(json.loads(line)) for line in text.splitlines() if line]


def _plain(text: str) -> object:
    try:
        return _timeless(json.loads(text))
    except ValueError:
        return text


def _timeless(value: object) -> object:
    """Dicts as lists, as the order of keys is part of the bytes."""
    if isinstance(value, dict):
        pairs = [(key, inner) for key, inner in value.items() if not TIMES.search(key)]
        return [(key, _timeless(inner)) for key, inner in pairs]
    return [_timeless(inner) for inner in value] if isinstance(value, list) else value


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    one, two = run(tmp_path / "one", "1"), run(tmp_path / "two", "2")
    names = [{path.relative_to(folder) for path in folder.rglob("*") if path.is_file()} for folder in (one, two)]
    assert names[0] == names[1]
    compared = sorted(name for name in names[0] if str(name) not in {RunFolder(one).page.name, *ALL_TIMES})
    assert {"adapter_config.json", "metrics.jsonl", "manifest.json"} <= {name.name for name in compared}
    assert (one / "final/adapter_config.json").read_bytes() == (two / "final/adapter_config.json").read_bytes()
    for name in compared:
        assert told(one / name, one) == told(two / name, two), name
