"""`runtime.ranks = N`: the same command in N processes, started and watched by torchrun.

The user's command writes the job to a file, starts torchrun, waits, and returns what rank 0 wrote next to that file. If
a rank dies, torchrun ends the others. A rank that fails writes its error next to the job too, so that the command can
name the cause. torchrun starts this module, once per rank.
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
from podium.settings.tables import Settings
from podium.terminal import warn

START_LIMIT = timedelta(minutes=10)
"""How long ranks wait for each other in a collective call before the run fails."""
END_S = 10.0
"""How long rank 0 tries to tell the others to end after an error. A rank that waits inside a forward or backward pass
does not notice before the process of rank 0 ends."""
RANKS_PER_CORE = 8
RANK_MODULE = "podium.runtime.ranks.launch"
"""This module, which torchrun starts once per rank."""


def is_rank() -> bool:
    """Whether this process was started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_by(launcher: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Marks a runtime whose loop does not run in the process of the user's command. `launcher(settings)` returns the
    function that starts the loop elsewhere, or None inside the process that runs the loop."""

    def mark(runtime: Any) -> Any:
        runtime.launcher = launcher
        return runtime

    return mark


def check_ranks(settings: Settings, ranks: int) -> None:
    """Refuses settings that do not go with several ranks, or with one."""
    trainer = settings.trainer.name
    if ranks == 1 and trainer in ("fsdp", "deepspeed"):
        raise InputError(f"trainer.name = {trainer!r} is for several ranks; set runtime.ranks, or use 'single'")
    if ranks > 1 and settings.run.max_lag and settings.engine_traits.shares_weights:
        raise InputError(
            "run.max_lag with runtime.ranks needs an engine in another process: ranks train and sample in turn; set "
            "engine.name = 'pool' or 'vllm_server'"
        )
    if ranks == 1 or trainer == "single":
        return
    if settings.pack.shared_prefix:
        raise InputError(f"pack.shared_prefix does not go with trainer.name = {trainer!r}; use 'single' or remove it")
    if settings.trainer.options.get("optimizer", "adamw") != "adamw":
        raise InputError(f"trainer.optimizer must be 'adamw' with trainer.name = {trainer!r}")


def check_packages(settings: Settings) -> None:
    """Refuses a trainer whose package is not installed here: each rank would find that out by itself."""
    if settings.trainer.name == "deepspeed" and find_spec("deepspeed") is None:
        raise InputError("trainer.name = 'deepspeed': DeepSpeed is not installed; pip install deepspeed, or use 'fsdp'")


def check_room(settings: Settings, ranks: int) -> None:
    """NCCL takes one rank per GPU. On a CPU ranks are for trying things out; more than a few per core only wait."""
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
        process = subprocess.Popen([*command, "-m", RANK_MODULE, str(path)], env=environment)
        was_asked = _wait(process)
        result = path.with_name("result.json")
        written: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {"error": "RankError"}
        if written.get("error") in (None, "RankError"):  # also a run that torchrun stopped because a rank had failed
            written = _cause(path) or written
        if written.get("summary", {}).get("state") == "stopped" and not was_asked:
            written = {"error": "RankError", "message": "a rank was lost, and torchrun stopped the others"}
    if "error" in written:
        code = process.returncode
        raise _as_error({"message": f"the ranks ended without a result (torchrun's exit code {code})", **written})
    return written["summary"]


def _cause(path: Path) -> dict[str, Any] | None:
    """The first error that a rank wrote and that is not the loss of another rank."""
    troubles = [json.loads(file.read_text()) for file in sorted(path.parent.glob("trouble-*.json"))]
    return next((trouble for trouble in troubles if trouble["error"] != "RankError"), None)


def _wait(process: subprocess.Popen[bytes]) -> bool:
    """Forwards signals to torchrun, which passes them to the ranks; rank 0 then commits and ends. Whether one came."""
    previous, forwarded = {}, []

    def forward(number: int, _: Any) -> None:
        forwarded.append(number)
        process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, forward)
    try:
        process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return bool(forwarded)


def _as_error(written: dict[str, Any]) -> PodiumError:
    """The error that rank 0 wrote, as an error of the same class."""
    import podium.errors

    kind = getattr(podium.errors, written["error"], PodiumError)
    return kind(written["message"]) if issubclass(kind, PodiumError) else PodiumError(written["message"])


def run_rank(path: Path) -> int:
    """One rank, from start to end; an error is written next to the job file."""
    import torch.distributed as dist

    from podium.runtime.ranks.line import join

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


def _lead(result: Path, job: dict[str, Any], settings: Settings) -> int:
    """The command itself, as if there were no other ranks."""
    from podium.run.folder import RunFolder
    from podium.run.start import resume, train

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
    from podium.runtime.ranks.line import join

    try:
        with join().order("end"):
            return 0
    except (RankError, AssertionError):  # lost, or a thread of this process is stuck with an order
        return 1


def end_process(code: int) -> None:
    """Ends the process of a rank. A failed rank ends at once, even if one of its threads, or another rank, is stuck."""
    from podium.runtime.ranks.line import join

    sys.stdout.flush()
    sys.stderr.flush()
    if not code:
        sys.exit(0)
    if not join().rank:
        telling = threading.Thread(target=_end_others, daemon=True)
        telling.start()
        telling.join(timeout=END_S)
    os._exit(code)


def _follow(settings: Settings) -> int:
    """Rank 0 decides when the run ends, so the other ranks ignore signals."""
    from podium.data.build import read_sources
    from podium.runtime.local import serve_rank
    from podium.runtime.ranks.line import join

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


if __name__ == "__main__":
    end_process(run_rank(Path(sys.argv[1])))
