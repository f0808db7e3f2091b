"""Whether every loss learns: a short run of the demo with each, held-out accuracy before and after.

    python benchmarks/losses.py [--steps 30] [--out benchmarks/results/losses_cpu.json]

The demo's settings and learning rate for all of them, LoRA, one seed: it shows that a loss works, not which is best.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from podium.run.start import train
from podium.settings.lookup import choices
from podium.settings.tables import Settings

DEMO = Path(__file__).parent.parent / "examples" / "arithmetic" / "settings.toml"


def main(steps: int, out: Path | None) -> None:
    rows = []
    for name in choices("loss"):
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"--run.steps={steps}", f"--run.folder={folder}/run", "--eval.every=0", "--checkpoint.every=0"]
            settings = Settings.from_toml(DEMO, flags)
            tables = {**settings.to_dict(), "loss": {"name": name}, "report": []}
            started = time.monotonic()
            summary = train(Settings.from_dict(tables))
            seconds = time.monotonic() - started
        row = {"loss": name, "before": summary.accuracy_before, "after": summary.accuracy_after, "seconds": seconds}
        rows.append(row)
        print(f"{name:<20} {row['before']:.3f} → {row['after']:.3f}   {seconds:.0f} s", flush=True)
    if out is not None:
        made = {
            "command": f"python benchmarks/losses.py --steps {steps}",
            "date": time.strftime("%Y-%m-%d"),
            "rows": rows,
        }
        out.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--out", type=Path)
    options = arguments.parse_args()
    main(options.steps, options.out)
