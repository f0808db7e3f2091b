"""A process that has imported everything and forks a child a job: importing torch again for each would take seconds.

In: one JSON object a line, {"arguments": [...]} for the command line or {"call": "module:function", "given": [...]},
with "log" (a file for what it prints), "kill_after_s", "environment" and "prepare" (functions called first). Out:
{"pid"} when it runs, {"status"} when it ended (negative: the signal). One job at a time. It never runs torch itself, so
that a fork copies no thread.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

POLL_S = 0.001


def main() -> None:
    import peft.tuners.lora  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401

    import podium.run
    import podium.runtime.local  # noqa: F401
    from podium.model.load import load_policy
    from podium.sections import Model

    load_policy(Model(device="cpu"), seed=0)  # what a first load imports
    answer({"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(job)
        answer({"pid": pid})
        answer({"status": wait(pid, job.get("kill_after_s"))})


def run(job: dict[str, Any]) -> None:
    """In the child; never returns."""
    code = 70
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(job.get("environment", {}))
        for name in job.get("prepare", ()):
            function(name)()
        if "call" in job:
            code = function(job["call"])(*job["given"]) or 0
        else:
            from podium import cli

            code = cli.main(job["arguments"])
    except BaseException:
        with suppress(OSError):
            traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def wait(pid: int, kill_after_s: float | None) -> int:
    """Kills from outside, at a moment that the child knows nothing of."""
    deadline = time.monotonic() + (3600 if kill_after_s is None else kill_after_s)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        time.sleep(POLL_S)


def answer(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
