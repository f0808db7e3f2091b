"""How long `make demo` and `make demo-full` take here, and what they reach: three times each, each in its own process.

    python benchmarks/demo.py

Seconds are of the training loop with its evaluations, without loading; on two idle cores at most 60 are expected.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples" / "arithmetic"
ROUNDS = 3


def main() -> None:
    for name in ("settings.toml", "full.toml"):
        for _ in range(ROUNDS):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "podium.cli", "train", str(EXAMPLES / name), "--json"]
                done = subprocess.run(
                    [*command, f"--run.folder={folder}/run"], capture_output=True, text=True, check=True
                )
                told = json.loads(done.stdout.splitlines()[-1])
            before, after = told["accuracy_before"], told["accuracy_after"]
            print(f"{name:<14} {told['seconds']:6.1f} s   accuracy {before:.3f} -> {after:.3f}", flush=True)


if __name__ == "__main__":
    main()
