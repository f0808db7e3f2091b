"""Train, resume, evaluate: what the command line and `import podium` offer.

A run here is the loop with everything around it: the folder and its lock, signals, the status file, the summary.
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
from podium.calibrate import choose_engine, without_auto
from podium.contracts import user_code
from podium.data._table import left_out
from podium.errors import CheckpointError, CrashLoopError, InputError, RunStopped, StorageError
from podium.evaluation import Results, held_out_groups
from podium.lookup import find
from podium.model.load import load_policy
from podium.records import Group, RunState
from podium.report._idle import is_zero_gradient
from podium.run_folder import RunFolder
from podium.runtime._build import (
    Wired,
    build_data,
    build_scoring,
    check_rewards,
    eval_options,
    read_sources,
)
from podium.runtime._core import check_ranks
from podium.runtime._engine import cpu_team, fitted, hand_over, make_engine, make_rollout
from podium.runtime._launch import check_packages, check_room, is_rank
from podium.runtime._launch import launch as launch_ranks
from podium.runtime._signals import StopSignal
from podium.settings import Settings
from podium.terminal import warn

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
UNTRAINED = 3
"""Exit code of a run that finished and changed nothing."""
FIRST_BACK_OFF_S, MAX_BACK_OFF_S = 0.05, 30.0


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    state: str
    """"finished" or "stopped"."""
    step: int
    steps: int
    seconds: float
    """From the loop's start to its end, evaluations and checkpoints included, loading the model not."""
    message: str
    """Why it ended before its last step, if it did so in good order; else empty."""
    accuracy_before: float | None
    """Held-out, at the first evaluation."""
    accuracy_after: float | None
    """Held-out, at the last one."""
    skipped_steps: int
    dropped_groups: int
    """Prompts that an engine failed at in every try."""
    restarts: int
    """Times that the run was taken up again."""
    folder: str
    page: str | None
    model: str | None
    """Folder of the trained model, once finished."""
    exit_code: int
    """0 finished, 3 finished but nothing was trained, 128 + its number after a signal."""
    untrained: str = ""
    """Why no step changed the policy; empty where one did."""


def train(settings: Settings, *, console_mode: str | None = None) -> Summary:
    """A new run. Nothing is written before the model, the data and the rewards are known to be good."""
    settings = settings.resolve()
    path = settings.run.folder.expanduser() if settings.run.folder else _new_path(settings.run.name)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"folder": path})})
    folder = RunFolder(path)
    folder.refuse_if_used()
    if not is_rank():  # or each of them would say it
        for caution in settings.cautions:
            warn(f"warning: {caution}")
    launcher_of(settings)  # refuses what cannot be, before an engine is chosen by trying both
    settings, choice = choose_engine(settings)
    if choice:
        warn(choice)
    if launch := launcher_of(settings):
        job = {"folder": None, "step": None, "allow_change": []}
        return Summary(**launch({"settings": settings.to_dict(), "console_mode": console_mode, **job}))
    with cpu_team(settings), StopSignal(settings.run.grace_s) as stop:
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
    """Goes on from the newest checkpoint, or that of `step`; `settings` are the run's own, perhaps with more steps.

    Those that make it another run may only differ where `allow_change` names them.
    """
    if launch := launcher_of(settings):
        job = {"folder": str(folder.path), "step": step, "allow_change": list(allow_change)}
        return Summary(**launch({"settings": settings.to_dict(), "console_mode": console_mode, **job}))
    folder.allowed_changes = tuple(allow_change)
    folder.lock()
    try:
        with cpu_team(settings), StopSignal(settings.run.grace_s) as stop:
            _back_off(settings, folder)
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
        return _held_out(settings, weights)


def _held_out(settings: Settings, weights: Path | None) -> Results:
    check_rewards(settings)
    rows = read_sources(settings.eval.data)
    policy = load_policy(settings.model, seed=settings.run.seed, weights=weights)
    held_out = build_data(settings, rows, policy, settings.plan)
    for note in left_out(held_out, "eval.data"):
        warn(note)
    engine = make_engine(fitted(settings, max(held_out.lengths)), policy, snapshot=False)
    rollout = make_rollout(settings, engine, policy, eval_options(settings), settings.eval.n, "eval")
    scoring = build_scoring(settings, [held_out], all_rows=False).for_evaluation()

    async def groups() -> list[Group]:
        await hand_over(settings, engine, policy, f"eval-{uuid4().hex[:12]}")
        return await held_out_groups(rollout, scoring, held_out.in_order())

    with closing(engine), closing(scoring):
        return Results(asyncio.run(groups()), settings.eval.ks, held_out.tables)


def launcher_of(settings: Settings) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """What has this job run elsewhere and gives back its summary; None where this process is the one to run it.

    A runtime with a `launcher(settings)` says itself; `runtime.ranks` starts more processes like this one.
    """
    if launcher := getattr(find("runtime", settings.runtime.name), "launcher", None):
        return launcher(settings)
    ranks = settings.runtime.options.get("ranks", 1)
    starts_ranks_itself = getattr(find("runtime", settings.runtime.name), "starts_ranks", False)
    if ranks == 1 or starts_ranks_itself or is_rank():
        return None
    check_ranks(settings, ranks)
    check_room(settings, ranks)
    check_packages(settings)
    return partial(launch_ranks, ranks=ranks)


def _new_path(name: str) -> Path:
    """runs/<time>-<name>, with a number where two runs begin in the same second."""
    first = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    paths = [first, *(first.with_name(f"{first.name}-{number}") for number in range(2, 1000))]
    return next(path for path in paths if not path.exists())


def _wire(settings: Settings, folder: RunFolder, stop: StopSignal, step: int | None, console_mode: str | None) -> Wired:
    name, runtime = settings.runtime.name, find("runtime", settings.runtime.name)
    with user_code("runtime.name", name):
        wired = runtime(settings, folder, stop.requested, step, console_mode, **settings.runtime.options)
    if not isinstance(wired, Wired):
        raise InputError(f"runtime.name = {name!r} returned a {type(wired).__name__}, which is no wired run")
    return wired


def _back_off(settings: Settings, folder: RunFolder) -> None:
    """A run that dies again and again before it gets on is taken up more and more slowly, and then not any more."""
    in_a_row = folder.count_restart()
    if in_a_row >= settings.run.max_restarts:
        raise CrashLoopError(
            f"the last {in_a_row} resumes of {folder.path} ended before a commit; look at status.json and events.jsonl "
            f"for the cause, mend it, and resume with --run.max_restarts={2 * in_a_row}"
        )
    time.sleep(min(MAX_BACK_OFF_S, FIRST_BACK_OFF_S * 2**in_a_row) if in_a_row > 1 else 0)


async def _until_stopped(wired: Wired) -> RunState:
    """The loop; broken off by a signal while it samples, it ends with the last whole step."""
    with wired.watch.guarding():
        try:
            schedule = loop_async if wired.plan.max_lag else loop
            return await schedule.train(wired.stages, wired.plan)
        except RunStopped:
            return await wired.stages.checkpoint.commit_last()


def _run(folder: RunFolder, wired: Wired, stop: StopSignal) -> Summary:
    """The loop; however it ends, the status says so and the lock is gone."""
    try:
        started = time.monotonic()
        with _old_objects_left_alone():
            state = asyncio.run(_until_stopped(wired))
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
    """The garbage collector looks at nothing that was there before, libraries above all: that takes it a quarter of a
    second each time. Afterwards it does again, so that a model goes with its run."""
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
            f"{error.filename or folder.path}: {error.strerror}; the last checkpoint is untouched: make room or mend "
            "the disk, and resume"
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
