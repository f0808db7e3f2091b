"""`runtime.ranks = N`: the same command in N processes, started and watched by torchrun.

The command that a user gave stays in front: it hands the job to torchrun as a file, waits, and gives back what rank 0
wrote beside it. If one rank dies, torchrun ends the others. A rank that fails writes its error beside the job too, so
that the command names the cause and not only that a rank was lost.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from podium.errors import InputError, PodiumError, RankError
from podium.terminal import warn

START_LIMIT = timedelta(minutes=10)
"""How long the ranks wait for each other in a collective call before the run is given up."""
END_S = 10.0
"""After an error, how long rank 0 tries to tell the others the end. One that waits for it inside a pass hears nothing
before rank 0's process ends."""


RANKS_PER_CORE = 8


def is_rank() -> bool:
    """Whether this process was started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_by(launcher: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Marks a runtime whose loop runs elsewhere than in the user's command: `launcher(settings)` gives what starts it
    there, or None where this is that place."""

    def mark(runtime: Any) -> Any:
        runtime.launcher = launcher
        return runtime

    return mark


def check_packages(settings: Any) -> None:
    """What the ranks of this machine would miss, each by itself."""
    if settings.trainer.name == "deepspeed" and find_spec("deepspeed") is None:
        raise InputError("trainer.name = 'deepspeed': DeepSpeed is not installed; pip install deepspeed, or use 'fsdp'")


def check_room(settings: Any, ranks: int) -> None:
    """NCCL takes one rank for a GPU. On a CPU ranks are for trying things out, and more than a few a core only wait."""
    import torch

    on_cpu = settings.model.device == "cpu" or not torch.cuda.is_available()
    most = RANKS_PER_CORE * len(os.sched_getaffinity(0)) if on_cpu else torch.cuda.device_count()
    if ranks > most:
        kind = f"{RANKS_PER_CORE} for each CPU core" if on_cpu else "one for each GPU"
        raise InputError(f"runtime.ranks = {ranks}: this machine has room for {most}, {kind}; lower it")


def launch(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Runs the job on all ranks; the summary that rank 0 wrote, or its error."""
    with tempfile.TemporaryDirectory(prefix="podium-ranks-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        process = subprocess.Popen([*command, "-m", "podium.runtime._rank", str(path)], env=environment)
        _wait(process)
        result = path.with_name("result.json")
        written: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"error": "RankError"}
        if written.get("error") in (None, "RankError"):  # also a run that torchrun stopped because a rank had failed
            written = _cause(path) or written
    if "error" in written:
        code = process.returncode
        raise _as_error({"message": f"the ranks ended without a result (torchrun's exit code {code})", **written})
    return written["summary"]


def _cause(path: Path) -> dict[str, Any] | None:
    """What a rank met that was not another one's failure, the first of them."""
    troubles = [json.loads(file.read_text()) for file in sorted(path.parent.glob("trouble-*.json"))]
    return next((trouble for trouble in troubles if trouble["error"] != "RankError"), None)


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Signals go on to torchrun, which passes them to the ranks; rank 0 then commits and ends."""
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, lambda number, _: process.send_signal(number))
    try:
        process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _as_error(written: dict[str, Any]) -> PodiumError:
    """The same kind of error as rank 0 met."""
    import podium.errors

    kind = getattr(podium.errors, written["error"], PodiumError)
    return kind(written["message"]) if issubclass(kind, PodiumError) else PodiumError(written["message"])


def run_rank(path: Path) -> int:
    """One rank, from its start to its end; what it fails at is written beside the job."""
    import torch.distributed as dist

    from podium.runtime._ranks import join
    from podium.settings import Settings

    job = json.loads(path.read_text())
    settings = Settings.from_dict(job["settings"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if _has_cuda() else "gloo", timeout=START_LIMIT)
    rank = join().rank
    try:
        return _follow(settings) if rank else _lead(path.with_name("result.json"), job, settings)
    except Exception as error:
        if not isinstance(error, PodiumError):
            warn(traceback.format_exc())
        trouble = {"error": type(error).__name__, "message": f"rank {rank}: {_named(error)}"}
        unfinished = path.with_name(f"trouble-{rank}.tmp")
        unfinished.write_text(json.dumps(trouble))
        unfinished.rename(path.with_name(f"trouble-{rank}.json"))
        is_left_to_rank_0 = isinstance(error, InputError) and not join().has_met  # which has the same settings
        return 0 if is_left_to_rank_0 else 1


def _named(error: Exception) -> str:
    return str(error) if isinstance(error, PodiumError) else f"{type(error).__name__}: {error}"


def _lead(result: Path, job: dict[str, Any], settings: Any) -> int:
    """The command itself, as if there were no other ranks."""
    from podium.run import resume, train
    from podium.run_folder import RunFolder

    written: dict[str, Any]
    code = 0
    try:
        if job["folder"] is None:
            summary = train(settings, console_mode=job["console_mode"])
        else:
            folder = RunFolder.open(Path(job["folder"]))
            others = {"step": job["step"], "console_mode": job["console_mode"], "allow_change": job["allow_change"]}
            summary = resume(settings, folder, **others)
        written = {"summary": asdict(summary)}
    except PodiumError as error:
        written, code = {"error": type(error).__name__, "message": str(error)}, 1
    result.write_text(json.dumps(written))
    return code or _end_others()


def _end_others() -> int:
    """Tells the other ranks that all is done."""
    from podium.runtime._ranks import join

    try:
        with join().order("end"):
            return 0
    except (RankError, AssertionError):  # lost, or a thread of this process is stuck with an order
        return 1


def end_process(code: int) -> None:
    """Of a rank. One that failed ends at once, though a thread of it, or another rank, may be stuck in a pass."""
    from podium.runtime._ranks import join

    sys.stdout.flush()
    sys.stderr.flush()
    if not code:
        sys.exit(0)
    if not join().rank:
        telling = threading.Thread(target=_end_others, daemon=True)
        telling.start()
        telling.join(timeout=END_S)
    os._exit(code)


def _follow(settings: Any) -> int:
    """Rank 0 decides when it ends, so signals are not for this one."""
    from podium.runtime._build import read_sources
    from podium.runtime._core import serve_rank
    from podium.runtime._ranks import join

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve_rank(settings, read_sources(settings.data), join())
    return 0


def _has_cuda() -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return True
