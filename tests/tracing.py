"""Which files of Podium one step of the demo passes, in the order of their first call.

Run as a program: `python -m tests.tracing FOLDER` trains the demo's settings for one step in FOLDER and prints the
files as a JSON list. It counts calls from the start of the step's window until the step is committed, in all threads.
"""

import json
import sys
import threading
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

import podium

PACKAGE = Path(podium.__file__).parent
SETTINGS = Path(__file__).parent.parent / "examples" / "arithmetic" / "settings.toml"


class CallTrace:
    """A profile function that notes the first call into each file of the package while `is_on`."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.is_on and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                self.files.setdefault(path.relative_to(PACKAGE).as_posix())


def trace_step(folder: Path) -> list[str]:
    """Trains one step with the demo's settings, without evaluation."""
    trace = CallTrace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    import podium.report.page
    from podium.observer import Observer
    from podium.run.checkpoint import FolderCheckpoint
    from podium.run.start import train
    from podium.settings.tables import Settings

    start_window, finish = Observer.start_window, FolderCheckpoint.finish

    def start(self: Observer) -> None:
        trace.is_on = True
        start_window(self)

    async def committed(self: FolderCheckpoint, *args: Any) -> None:
        await finish(self, *args)
        trace.is_on = False

    Observer.start_window, FolderCheckpoint.finish = start, committed
    tables = tomllib.loads(SETTINGS.read_text())
    tables.pop("eval", None)
    tables["run"] |= {"steps": 1, "folder": str(folder), "prompts_per_step": 4}
    tables["model"] = tables.get("model", {}) | {"device": "cpu"}
    # The page is written by time. Here only at the start and at the end of the run, so that the trace repeats.
    podium.report.page.EVERY_S = 3600.0
    tables["report"] = [{"name": "console"}, {"name": "page"}]
    train(Settings.from_dict(tables))
    sys.setprofile(None)
    return list(trace.files)


if __name__ == "__main__":
    print(json.dumps(trace_step(Path(sys.argv[1]))))
