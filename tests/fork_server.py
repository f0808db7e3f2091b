"""A process that has imported everything and forks a child a job: importing torch again for each would take seconds.

In: one JSON object a line, {"arguments": [...]} for the command line or {"call": "module:function", "given": [...]},
with "stdout" and "stderr" (files that what it prints is appended to), "status" (a file for its exit status; negative:
the signal), "environment" (all of it), "folder" (where it works), "constants" ("module:NAME" and the value that it
has in this job), "prepare" (functions called first) and "kill_after_s". Out: {"ready"}, then {"pid"} for each job. Jobs
run side by side. The server itself does no more with torch than load a model, so that a fork copies no thread. Its
arguments are modules to import besides.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

POLL_S = 0.001


REPLIES = os.dup(1)


def main() -> None:
    os.dup2(2, 1)  # modules may print while they are imported
    import peft.tuners.lora  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import podium.run.start
    import podium.runtime.local  # noqa: F401
    from podium.model.load import load_policy
    from podium.settings.sections import Model

    load_policy(Model(device="cpu"), seed=0)  # what a first load imports
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or a collection in a child would visit and so copy all that was imported: half of a small run's time
    answer({"ready": True})
    serve()


def serve() -> None:
    """Until nobody can send more jobs; those that run then are killed, or they would run on after killed tests."""
    running: dict[int, dict[str, Any]] = {}
    unread = b""
    while True:
        if select.select([0], [], [], POLL_S if running else None)[0]:
            if not (data := os.read(0, 1 << 16)):
                for pid in running:
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                job = json.loads(line)
                if (pid := os.fork()) == 0:
                    run(job)
                running[pid] = job | {"deadline": time.monotonic() + job.get("kill_after_s", 1e6)}
                answer({"pid": pid})
        for pid, job in [*running.items()]:
            if time.monotonic() > job["deadline"]:  # from outside, at a moment that the child knows nothing of
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                tell(Path(job["status"]), os.waitstatus_to_exitcode(status))


def tell(path: Path, status: int) -> None:
    """Whole or not at all."""
    half = path.with_suffix(".half")
    with suppress(FileNotFoundError):  # nobody waits for it any more
        half.write_text(str(status))
        half.rename(path)


def run(job: dict[str, Any]) -> None:
    """In the child; never returns."""
    code = 70
    try:
        os.close(REPLIES)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        tempfile.tempdir = None  # as the environment says
        sys.argv = ["podium", *job.get("arguments", ())]
        for name, value in job.get("constants", {}).items():
            module, _, attribute = name.partition(":")
            setattr(importlib.import_module(module), attribute, value)
        for name in job.get("prepare", ()):
            function(name)()
        code = result(job)
        if "call" not in job:  # as Python itself ends
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    except BaseException:
        with suppress(OSError):
            traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def result(job: dict[str, Any]) -> int:
    if "call" in job:
        return function(job["call"])(*job["given"]) or 0
    from podium import cli

    try:
        cli.console()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def answer(message: dict[str, Any]) -> None:
    os.write(REPLIES, (json.dumps(message) + "\n").encode())


if __name__ == "__main__":
    main()
