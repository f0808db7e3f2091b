"""`runtime.ranks = N`: the same command in N processes, which torchrun starts and watches.

The command writes the job to a file, starts torchrun, waits, and returns the summary that rank 0 wrote next to that
file. If a rank dies, torchrun ends the others. A rank that fails writes its error next to the job file, so that the
command can name the cause. torchrun starts this module once per rank.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from dataclasses import asdict
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import podium.errors
from podium.errors import InputError, PodiumError, RankError
from podium.run.folder import RunFolder
from podium.runtime.ranks import join
from podium.settings.tables import Settings
from podium.untrusted import warn

START_LIMIT = timedelta(minutes=10)
"""How long ranks wait for each other in a collective call before the run fails."""
END_S = 10.0
"""How long rank 0 tries to tell the others to end after an error. A rank that waits inside a forward or backward pass
does not notice before the process of rank 0 ends."""
RANKS_PER_CORE = 8


def is_rank() -> bool:
    """Whether this process was started by torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def check_ranks(settings: Settings, ranks: int) -> None:
    """Refuses settings that do not go with several ranks, or with one."""
    trainer = settings.trainer.name
    if ranks == 1 and trainer in ("fsdp", "deepspeed"):
        raise InputError(f"trainer.name = {trainer!r} is for several ranks; set runtime.ranks, or use 'single'")
    samples = settings.engine_traits.shares_weights and "rollout_workers" not in settings.runtime.options
    if ranks > 1 and settings.run.max_lag and samples:
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


def check_machine(settings: Settings, ranks: int) -> None:
    """Refuses more ranks than this machine has room for, and a trainer whose package is not installed.

    NCCL takes one rank per GPU. On a CPU, ranks are for trying things out; more than a few per core only wait.
    """
    on_cpu = settings.model.device == "cpu" or not torch.cuda.is_available()
    most = RANKS_PER_CORE * len(os.sched_getaffinity(0)) if on_cpu else torch.cuda.device_count()
    if ranks > most:
        kind = f"{RANKS_PER_CORE} for each CPU core" if on_cpu else "one for each GPU"
        raise InputError(f"runtime.ranks = {ranks}: this machine has room for {most}, {kind}; lower it")
    if settings.trainer.name == "deepspeed" and find_spec("deepspeed") is None:
        raise InputError("trainer.name = 'deepspeed': DeepSpeed is not installed; pip install deepspeed, or use 'fsdp'")


def launch(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Runs the job on all ranks; returns the summary that rank 0 wrote, or raises the error that ended the run."""
    with tempfile.TemporaryDirectory(prefix="podium-ranks-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        process = subprocess.Popen([*command, "-m", "podium.runtime.ranks.launch", str(path)], env=environment)
        was_asked = _wait(process)
        result = path.with_name("result.json")
        summary: dict[str, Any] | None = json.loads(result.read_text()) if result.exists() else None
        errors = [json.loads(file.read_text()) for file in sorted(path.parent.glob("error-*.json"))]
    causes = [error for error in errors if error["error"] != "RankError"]  # and not the loss of another rank
    if causes or (errors and summary is None):
        cause = (causes or errors)[0]
        raise error_called(cause["error"], cause["message"]) or PodiumError(cause["message"])
    if summary is None:
        raise RankError(f"the ranks ended without a result (torchrun's exit code {process.returncode})")
    if summary["state"] == "stopped" and not was_asked:
        raise RankError("a rank was lost, and torchrun stopped the others")
    return summary


def _wait(process: subprocess.Popen[bytes]) -> bool:
    """Forwards signals to torchrun, which passes them to the ranks; rank 0 then commits and ends. Returns whether a
    signal came."""
    forwarded = []

    def forward(number: int, _: Any) -> None:
        forwarded.append(number)
        process.send_signal(number)

    previous = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return bool(forwarded)


def error_called(name: str, message: str) -> PodiumError | None:
    """An error that another process named; None unless it is one of Podium's."""
    kind = getattr(podium.errors, name, None)
    return kind(message) if isinstance(kind, type) and issubclass(kind, PodiumError) else None


def run_job(job: dict[str, Any], settings: Settings, folder: RunFolder | None) -> dict[str, Any]:
    """The user's command in this process, without starting others; returns its summary. `folder` is the run to resume,
    or None for a new run."""
    from podium.run.start import resume, train

    if folder is None:
        return asdict(train(settings, console_mode=job["console_mode"]))
    options = {name: job[name] for name in ("step", "allow_change", "console_mode")}
    return asdict(resume(settings, folder, **options))


def meet() -> None:
    """Waits for the other ranks; each takes a GPU of its own where there are any. The environment says where they
    meet."""
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=START_LIMIT)


def run_rank(path: Path) -> int:
    """One rank, from start to end; returns its exit code. Rank 0 writes the summary next to the job file, and any rank
    its error."""
    job = json.loads(path.read_text())
    settings = Settings.from_dict(job["settings"])
    meet()
    rank = join().rank
    try:
        if rank:
            return _follow(settings)
        folder = None if job["folder"] is None else RunFolder.open(Path(job["folder"]))
        path.with_name("result.json").write_text(json.dumps(run_job(job, settings, folder)))
        return _end_others()
    except Exception as error:
        message = str(error) if isinstance(error, PodiumError) else f"{type(error).__name__}: {error}"
        if not isinstance(error, PodiumError):
            warn(traceback.format_exc())
        if rank or not isinstance(error, PodiumError):
            message = f"rank {rank}: {message}"
        unfinished = path.with_name(f"error-{rank}.tmp")
        unfinished.write_text(json.dumps({"error": type(error).__name__, "message": message}))
        unfinished.rename(path.with_name(f"error-{rank}.json"))
        is_left_to_rank_0 = rank > 0 and isinstance(error, InputError) and not join().has_met  # the same settings
        return 0 if is_left_to_rank_0 else 1


def _follow(settings: Settings) -> int:
    """Rank 0 decides when the run ends, so the other ranks ignore signals."""
    from podium.runtime.local import serve_rank

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve_rank(settings, join())
    return 0


def _end_others() -> int:
    """Tells the other ranks that all is done; returns 1 if they cannot be told."""
    try:
        with join().order("end"):
            return 0
    except (RankError, AssertionError):  # lost, or a thread of this process is stuck with an order
        return 1


def end_process(code: int) -> None:
    """Ends the process of a rank. A failed rank ends at once, even if one of its threads, or another rank, is stuck."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not code:
        sys.exit(0)
    if not join().rank:
        telling = threading.Thread(target=_end_others, daemon=True)
        telling.start()
        telling.join(timeout=END_S)
    os._exit(code)


if __name__ == "__main__":
    end_process(run_rank(Path(sys.argv[1])))
