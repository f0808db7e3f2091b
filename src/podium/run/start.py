"""Train, resume, evaluate: what the command line and `import podium` offer.

A run is the loop with everything around it: the folder and its lock, signals, the status file, the summary. SIGINT and
SIGTERM ask the run to stop at the next safe point. A second signal, or the end of the grace time, ends the process at
once; only what was not committed yet is lost.
"""

import asyncio
import errno
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from podium import loop, loop_async
from podium.check.calibrate import choose_engine, without_auto
from podium.data.build import build_data, left_out, read_sources
from podium.engine.build import cpu_team, fitted, hand_over, make_engine
from podium.errors import CheckpointError, CrashLoopError, InputError, StorageError
from podium.evaluation import Results, held_out_groups
from podium.model.load import load_policy
from podium.observer import StopSignal
from podium.records import Group, RunState
from podium.report.build import is_zero_gradient
from podium.reward.build import build_scoring, check_rewards
from podium.rollout.build import make_rollout_for
from podium.run.folder import RunFolder
from podium.runtime.ranks.launch import check_machine, check_ranks, is_rank
from podium.runtime.ranks.launch import launch as launch_ranks
from podium.runtime.wiring.stages import Placed, Wired, wire
from podium.settings.contracts import user_code
from podium.settings.lookup import find
from podium.settings.tables import Settings
from podium.untrusted import warn

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
UNTRAINED = 3
"""Exit code of a run that finished without changing the policy."""
MAX_RESTARTS = 20
"""Resumes in a row that ended before a checkpoint, after which a resume is refused: the cause will not go away."""
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.05, 30.0


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    state: str
    """"finished" or "stopped"."""
    step: int
    steps: int
    seconds: float
    """From the loop's start to its end, including evaluations and checkpoints, without loading the model."""
    message: str
    """Why it ended before its last step, if it ended normally; else empty."""
    accuracy_before: float | None
    """Held-out accuracy at the first evaluation."""
    accuracy_after: float | None
    """Held-out accuracy at the last evaluation."""
    skipped_steps: int
    dropped_groups: int
    """Prompts on which every attempt of the engine failed."""
    restarts: int
    """How often the run was resumed."""
    folder: str
    page: str | None
    model: str | None
    """Folder of the trained model, once finished."""
    exit_code: int
    """0 finished, 3 finished but nothing was trained, 128 + its number after a signal."""
    untrained: str = ""
    """Why no step changed the policy; empty if one did."""


def train(settings: Settings, *, console_mode: str | None = None) -> Summary:
    """Starts a new run. Nothing is written before the model, the data and the rewards have been checked."""
    settings = settings.resolve()
    path = settings.run.folder.expanduser() if settings.run.folder else _new_path()
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"folder": path})})
    folder = RunFolder(path)
    folder.refuse_if_used()
    if not is_rank():  # otherwise every rank would print it
        for caution in settings.cautions:
            warn(f"warning: {caution}")
    launcher_of(settings)  # rejects bad settings before an engine is chosen by trying both
    settings, choice = choose_engine(settings)
    if choice:
        warn(choice)
    if summary := _run_elsewhere(settings, console_mode):
        return summary
    with cpu_team(settings), StopSignal() as stop:
        wired = _wire(settings, folder, stop, None, console_mode)
        try:
            folder.create()
        except BaseException:
            wired.close()
            raise
        if choice:
            folder.event("engine_chosen", message=choice)
        return _run(folder, wired, stop)


def resume(
    settings: Settings,
    folder: RunFolder,
    *,
    step: int | None = None,
    console_mode: str | None = None,
    allow_change: Sequence[str] = (),
) -> Summary:
    """Continues from the newest checkpoint, or that of `step`; `settings` are the run's own, perhaps with more steps.

    Settings that would make it another run may differ only if `allow_change` names them.
    """
    job = {"folder": str(folder.path), "step": step, "allow_change": list(allow_change)}
    if summary := _run_elsewhere(settings, console_mode, **job):
        return summary
    folder.allowed_changes = tuple(allow_change)
    folder.lock()
    try:
        with cpu_team(settings), StopSignal() as stop:
            _back_off(folder)
            return _run(folder, _wire(settings, folder, stop, step, console_mode), stop)
    except (InputError, CrashLoopError):
        folder.uncount_restart()
        raise
    finally:
        folder.unlock()


def evaluate(settings: Settings, weights: Path | None = None) -> dict[str, float]:
    """Held-out metrics of `[model]`, or of trained `weights` (a model folder or an adapter folder)."""
    return held_out_results(settings, weights).metrics()


def held_out_results(settings: Settings, weights: Path | None = None) -> Results:
    """The same, with every rollout."""
    if not settings.eval.data:
        raise InputError("nothing to evaluate on: add an [[eval.data]] table")
    settings = without_auto(settings.resolve())
    with cpu_team(settings):
        check_rewards(settings)
        rows = read_sources(settings.eval.data)
        policy = load_policy(settings.model, seed=settings.run.seed, weights=weights)
        held_out = build_data(settings, rows, policy, settings.plan)
        for note in left_out(held_out, "eval.data"):
            warn(note)
        engine = make_engine(fitted(settings, max(held_out.lengths)), policy, snapshot=False)
        rollout = make_rollout_for(settings, engine, policy, "eval")
        scoring = build_scoring(settings, [held_out], all_rows=False).for_evaluation()

        async def groups() -> list[Group]:
            await hand_over(settings, engine, policy, f"eval-{uuid4().hex[:12]}")
            return await held_out_groups(rollout.start, scoring, held_out.in_order())

        with closing(engine), closing(rollout), closing(scoring):
            return Results(asyncio.run(groups()), settings.eval.ks, held_out.tables)


def launcher_of(settings: Settings) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """A function that runs the job elsewhere and returns its summary; None if this process runs it.

    A runtime may have its own `launcher(settings)`; `runtime.ranks` starts more processes like this one.
    """
    if launcher := getattr(find("runtime", settings.runtime.name), "launcher", None):
        return launcher(settings)
    ranks = settings.runtime.options.get("ranks", 1)
    starts_ranks_itself = getattr(find("runtime", settings.runtime.name), "starts_ranks", False)
    if ranks == 1 or starts_ranks_itself or is_rank():
        return None
    check_ranks(settings, ranks)
    check_machine(settings, ranks)
    return partial(launch_ranks, ranks=ranks)


def _run_elsewhere(
    settings: Settings,
    console_mode: str | None,
    folder: str | None = None,
    step: int | None = None,
    allow_change: Sequence[str] = (),
) -> Summary | None:
    """The summary of a run that other processes ran; None if this process runs it."""
    if (launch := launcher_of(settings)) is None:
        return None
    job = {"folder": folder, "step": step, "allow_change": allow_change}
    return Summary(**launch({"settings": settings.to_dict(), "console_mode": console_mode, **job}))


def _new_path() -> Path:
    """runs/<time>, with a number if two runs start in the same second."""
    first = Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    paths = [first, *(first.with_name(f"{first.name}-{number}") for number in range(2, 1000))]
    return next(path for path in paths if not path.exists())


def _wire(settings: Settings, folder: RunFolder, stop: StopSignal, step: int | None, console_mode: str | None) -> Wired:
    name, runtime = settings.runtime.name, find("runtime", settings.runtime.name)
    with user_code("runtime.name", name):
        placed = runtime(settings, folder, step, **settings.runtime.options)
    if not isinstance(placed, Placed):
        raise InputError(f"runtime.name = {name!r} returned a {type(placed).__name__}; it must return a Placed")
    try:
        return wire(settings, folder, placed, stop.requested, step, console_mode)
    except BaseException:
        placed.end()
        raise


def _back_off(folder: RunFolder) -> None:
    """Delays a run that repeatedly dies before it makes progress, longer each time, and finally rejects it."""
    in_a_row = folder.count_restart()
    if in_a_row >= MAX_RESTARTS:
        raise CrashLoopError(
            f"the last {in_a_row} resumes of {folder.path} ended before a commit; look at status.json and events.jsonl "
            f"for the cause, fix it, delete {folder.path / 'restarts.json'} and resume again"
        )
    time.sleep(min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2**in_a_row) if in_a_row > 1 else 0)


def _run(folder: RunFolder, wired: Wired, stop: StopSignal) -> Summary:
    """Runs the loop; however it ends, writes the status and releases the lock."""
    try:
        started = time.monotonic()
        stages, schedule = wired.stages, loop_async if wired.plan.max_lag else loop
        training = schedule.train(stages, wired.plan)
        with _old_objects_left_alone():
            state = asyncio.run(stages.observer.run(training, stages.checkpoint.commit_last, wired.watchdog.guarding()))
        folder.note_progress()
        summary = _summary(state, wired, folder, stop, time.monotonic() - started)
        nothing = f"nothing was trained: {summary.untrained}" if summary.untrained else ""
        folder.write_status(summary.state, state.step, wired.plan.steps, summary.message or nothing)
        folder.event(summary.state, step=state.step)
        wired.reports.finish(asdict(summary))
        return summary
    except BaseException as error:
        named = _named(error, folder)
        if wired.reports.has_started:
            with suppress(OSError, StorageError):  # the disk may be what failed
                wired.reports.fail()
                folder.fail(f"{type(named).__name__}: {named}")
                folder.event("failed", error=type(named).__name__, message=str(named))
        if named is not error:
            raise named from error
        raise
    finally:
        try:
            wired.close()
        finally:
            folder.unlock()


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Excludes existing objects, mostly libraries, from garbage collection: scanning them takes a quarter of a second
    each time. Afterwards they are included again, so that a model is freed with its run. A process that has excluded
    its libraries itself is left as it is."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _named(error: BaseException, folder: RunFolder) -> BaseException:
    """Disk errors and a lost run folder become `StorageError`, whichever stage hit them."""
    if isinstance(error, (OSError, CheckpointError)):
        try:
            folder.check_there()
        except StorageError as gone:
            return gone
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return StorageError(
            f"{error.filename or folder.path}: {error.strerror}; the last checkpoint is untouched: free disk space or "
            "fix the disk, and resume"
        )
    return error


def _summary(state: RunState, wired: Wired, folder: RunFolder, stop: StopSignal, seconds: float) -> Summary:
    history = wired.ledger.history()
    accuracies = [line["eval/accuracy"] for line in history if "eval/accuracy" in line]
    end = wired.stages.data.end(state)
    is_finished = end is not None
    num_idle = state.num_skipped_steps + sum(map(is_zero_gradient, history))
    untrained = wired.reports.idle.reasons if 0 < state.step == num_idle else ""
    return Summary(
        state="finished" if is_finished else "stopped",
        step=state.step,
        steps=wired.plan.steps,
        seconds=seconds,
        message=end if end and state.step < wired.plan.steps else "",
        accuracy_before=accuracies[0] if accuracies else None,
        accuracy_after=accuracies[-1] if len(accuracies) > 1 else None,
        skipped_steps=state.num_skipped_steps,
        dropped_groups=state.num_dropped_groups,
        restarts=folder.restarts,
        folder=str(folder.path),
        page=str(folder.page) if folder.page.exists() else None,
        model=str(folder.final) if is_finished else None,
        exit_code=(UNTRAINED if untrained else 0) if is_finished else 128 + (stop.number or 0),
        untrained=untrained,
    )
