"""From the stages that a runtime has placed to a run that is ready to start: the same for every runtime.

In: `Placed`, the stages whose place depends on the runtime. Out: `Wired`, all stages of the loop, with the reports, the
ledger and the watchdog. Nothing is written here.
"""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from podium.advantage.build import build_advantages
from podium.data.build import RunData, Source, read_sources
from podium.evaluation import HeldOut
from podium.filter import build_filter
from podium.observer import Observer
from podium.pack import build_pack
from podium.records import Batch, Plan, RunState, UpdateResult
from podium.report.build import Reports, build_reports, check_reports
from podium.report.page import Page
from podium.reward.build import check_rewards
from podium.reward.scoring.stage import Scoring
from podium.run.build import build_checkpoint, check_start
from podium.run.folder import Ledger, RunFolder, piece_decoder
from podium.run.watchdog import Watchdog, stall_limit_s
from podium.runtime.wiring.memory import MemoryPlan
from podium.settings.tables import Settings
from podium.stages import Rollouts, SavedTrainer, Stages, Sync


class PlacedEngine(Protocol):
    """What the run itself needs to know of its engine, one object or many containers."""

    @property
    def policy_version(self) -> int | None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Placed:
    """What a runtime returns: the stages whose place differs between runtimes."""

    data: RunData
    tokenizer: Any
    scoring: Scoring
    rollout: Callable[[str], Rollouts]
    """From the purpose, "train" or "eval", to the rollout stage."""
    engine: PlacedEngine
    trainer: SavedTrainer
    train: Callable[[Sequence[Batch]], Awaitable[UpdateResult]]
    """One step of the trainer, with what has to happen around it."""
    sync: Sync
    memory: MemoryPlan
    base_digest: str | None
    """Of the weights under the adapter, taken before they were spread over ranks; None for full weights."""
    begin: Callable[[], None] = lambda: None
    """Gives the trainer the weights that a new run starts from."""
    restored: Callable[[RunState, Path | None], None] = lambda state, place: None
    """Called with the state that the run begins with, and its checkpoint."""
    store: Callable[[Path], None] | None = None
    """Copies each new checkpoint to where the next attempt finds it."""
    page: type[Page] | None = None
    """A page of the runtime's own, in place of the report `page`."""
    end: Callable[[], None] = lambda: None
    """Ends what the runtime itself started."""


@dataclass(frozen=True)
class Wired:
    """A run that is ready to start."""

    stages: Stages
    engine: PlacedEngine
    """Closed when the run ends."""
    plan: Plan
    reports: Reports
    ledger: Ledger
    watchdog: Watchdog
    rollouts: Sequence[Rollouts] = ()
    """For training and for evaluation."""
    end: Callable[[], None] = lambda: None
    """Ends what the runtime itself started; called last."""

    def close(self) -> None:
        """Closes everything that was started; if one of them fails to close, the others are still closed."""
        stages = self.stages
        with ExitStack() as last_first:
            for close in (
                self.end,
                stages.sync.close,
                self.engine.close,
                *(each.close for each in self.rollouts),
                stages.reward.close,
                self.watchdog.end,
            ):
                last_first.callback(close)


def read_rows(settings: Settings) -> tuple[list[Source], list[Source]]:
    """The training rows and the held-out rows, after all checks that need no model."""
    check_rewards(settings)
    check_start(settings)
    check_reports(settings)
    return read_sources(settings.data), read_sources(settings.eval.data)


def wire(
    settings: Settings,
    folder: RunFolder,
    placed: Placed,
    stop_requested: Callable[[], bool],
    step: int | None,
    console_mode: str | None,
) -> Wired:
    """`step` names the checkpoint to continue from."""
    ledger = Ledger(folder, piece_decoder(placed.tokenizer))
    plan, data, held_out = placed.data.plan, placed.data.train, placed.data.held_out
    tokens = placed.memory.max_tokens_per_batch
    reports = build_reports(settings, folder, ledger, console_mode, plan.steps, tokens, placed.data.notes, placed.page)
    observer = Observer(
        event=folder.event,
        stop_requested=stop_requested,
        engine=placed.engine,
        channel=type(placed.sync).__name__.lower(),
    )
    rollout, held_out_rollout = placed.rollout("train"), placed.rollout("eval")
    stages = Stages(
        data=data,
        rollout=rollout.start,
        reward=placed.scoring,
        assign_advantages=build_advantages(settings),
        filter=build_filter(settings),
        pack=build_pack(settings, tokens, settings.runtime.options.get("ranks", 1)),
        train=placed.train,
        sync=placed.sync,
        checkpoint=build_checkpoint(
            settings,
            folder,
            placed.trainer,
            ledger,
            data.fingerprint,
            step,
            placed.base_digest,
            placed.begin,
            placed.store,
            placed.restored,
        ),
        report=reports,
        evaluation=HeldOut(
            held_out_rollout.start,
            placed.scoring.for_evaluation(),
            held_out.in_order() if held_out else [],
            data.end,
            settings.eval.every,
            reports.evaluated,
            settings.eval.ks,
            held_out.tables if held_out else None,
            observer.at,
        ),
        observer=observer,
    )
    options = settings.rollout.options
    stall_s = stall_limit_s(options.get("max_new_tokens", 1)) + options.get("episode_timeout_s", 0.0)
    watchdog = Watchdog(folder, observer, stall_s)
    return Wired(stages, placed.engine, plan, reports, ledger, watchdog, (rollout, held_out_rollout), placed.end)
