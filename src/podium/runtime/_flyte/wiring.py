"""Inside the driver's task: from settings to a run whose rollouts, rewards and training are tasks.

The driver reads the data and holds the ledger, the reports and the checkpoints; of the model it has the tokenizer.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from podium.checkpoint import FolderCheckpoint
from podium.data._order import OrderedData
from podium.data._table import left_out
from podium.ledger import Ledger
from podium.model.load import load_reader
from podium.records import Plan
from podium.report._card import run_card
from podium.report._fanout import Reports
from podium.report._pieces import Pieces, piece_decoder
from podium.report.page import Page
from podium.reward._scoring import Scoring
from podium.run_folder import RunFolder
from podium.runtime._build import (
    Wired,
    build_advantages,
    build_data,
    build_filter,
    build_pack,
    build_scoring,
    check_retirement,
    check_rewards,
    read_sources,
)
from podium.runtime._engine import fitted, probe_ids
from podium.runtime._events import LoggedRollout, LoggedSync, LoggedTrainer
from podium.runtime._flyte import tasks
from podium.runtime._flyte.driver import Driving
from podium.runtime._flyte.job import Job
from podium.runtime._flyte.live_report import LiveReport
from podium.runtime._flyte.replica import with_base
from podium.runtime._flyte.sdk import Dir
from podium.runtime._flyte.stages import (
    Engines,
    RemoteCheckpoint,
    RemoteRollout,
    RemoteTrainer,
    Sender,
    Stored,
    remote_score,
    step_of_reply,
)
from podium.runtime._keep import check_space, check_start, checkpoint_hooks
from podium.runtime._memory import MemoryPlan
from podium.runtime._reports import build_reports, check_reports
from podium.runtime._stages import evaluation
from podium.runtime._stop import stoppable
from podium.runtime._watch import Watch, watched
from podium.settings import Settings
from podium.stages import Stages


@dataclass(frozen=True)
class Read:
    """What the driver knows before a model is loaded anywhere."""

    reader: Any
    data: OrderedData
    held_out: OrderedData | None
    scoring: Scoring
    plan: Plan
    job: Job


def read(settings: Settings, run_id: str, base: Dir) -> Read:
    """Checks the settings and reads the data, as runtime/local.py does."""
    check_rewards(settings)
    check_start(settings)
    check_reports(settings)
    rows, held_out_rows = read_sources(settings.data), read_sources(settings.eval.data)
    reader: Any = load_reader(asyncio.run(with_base(settings, base)).model)
    data = build_data(settings, rows, reader, settings.plan)
    plan = replace(settings.plan, steps=data.num_steps)
    held_out = build_data(settings, held_out_rows, reader, plan) if held_out_rows else None
    every = [data, *([held_out] if held_out else [])]
    scoring = build_scoring(settings, every)
    check_retirement(settings, scoring, data)
    choices = tuple(sorted({names for source in every for names in source.reward_choices}))
    fit = fitted(settings, max(max(source.lengths) for source in every))
    job = Job(run_id, fit, plan.steps, max(data.lengths), tuple(probe_ids(settings, data)), choices)
    return Read(reader, data, held_out, scoring, plan, job)


def wire(
    driving: Driving,
    settings: Settings,
    folder: RunFolder,
    stop_requested: Callable[[], bool],
    step: int | None,
    console_mode: str | None,
    replicas: int,
    prompts_per_task: int | None,
) -> Wired:
    """`replicas` are the most rollout containers."""
    known = read(settings, driving.run_id, driving.base)
    data, held_out, plan = known.data, known.held_out, known.plan
    sender, engines = Sender(known.job.to_text(), driving.base, folder), Engines()
    start, told = step_of_reply(asyncio.run(sender.send(tasks.open_trainer, {}, base=driving.base)))
    memory = MemoryPlan(**told["memory"])
    check_space(settings, folder, memory, step)
    trainer = RemoteTrainer(sender, start, plan)
    ledger, watch = Ledger(folder), Watch(folder, settings.run.max_stall_s)
    reports = _reports(settings, folder, ledger, console_mode, known, memory)
    score = remote_score(sender)
    write = partial(RemoteRollout, sender, engines, replicas)
    stages = Stages(
        data=data,
        rollout=LoggedRollout(write("train", plan.rollouts_per_prompt, prompts_per_task), folder),
        reward=known.scoring.scored_by(score),
        assign_advantages=build_advantages(settings),
        filter=build_filter(settings),
        pack=build_pack(settings, memory),
        trainer=cast(Any, LoggedTrainer(cast(Any, trainer), folder)),
        sync=cast(Any, LoggedSync(Stored(trainer, engines), cast(Any, engines), folder)),
        checkpoint=_checkpoint(driving, settings, folder, trainer, ledger, data.fingerprint, step, told["base_digest"]),
        report=reports,
        evaluation=evaluation(
            settings,
            write("eval", settings.eval.n),
            known.scoring.for_evaluation().scored_by(score),
            data,
            held_out,
            reports,
            watch,
        ),
        stop_requested=stop_requested,
        event=folder.event,
    )
    return Wired(stoppable(watched(stages, watch), plan), cast(Any, engines), plan, reports, ledger, watch)


def _reports(
    settings: Settings, folder: RunFolder, ledger: Ledger, console_mode: str | None, known: Read, memory: MemoryPlan
) -> Reports:
    """The settings' and, in the place of the page, the page that Flyte shows too."""
    pieces = Pieces(folder.tokens, piece_decoder(known.reader.tokenizer))
    made = build_reports(settings, folder, ledger, console_mode, pieces)
    pages = [choice.options for choice in settings.report if choice.name == "page"]
    every = [*(report for report in made if not isinstance(report, Page)), LiveReport(folder, **(pages or [{}])[0])]
    card = run_card(settings.to_dict(), folder.path, known.plan.steps)
    notes = [*left_out(known.data, "data"), *(left_out(known.held_out, "eval.data") if known.held_out else ())]
    return Reports(every, folder, ledger, card, settings.to_toml(), memory.max_tokens_per_batch, notes)


def _checkpoint(
    driving: Driving,
    settings: Settings,
    folder: RunFolder,
    trainer: RemoteTrainer,
    ledger: Ledger,
    data_fingerprint: str,
    step: int | None,
    base_digest: str | None,
) -> Any:
    """The run's own checkpoints, each kept by the driver's store as well."""
    own = checkpoint_hooks(settings, folder, lambda: None)  # the trainer's tasks have loaded what the run starts from

    def committed(place: Path, step: int) -> None:
        driving.store.save(folder, place)
        own.committed(place, step)

    wiring: Any = (folder, trainer, ledger, data_fingerprint, settings.to_toml())
    given, hooks = settings.checkpoint, replace(own, committed=committed)
    others: Any = {"step": step, "base_digest": base_digest, "hooks": hooks}
    checkpoint = FolderCheckpoint(*wiring, every=given.every, keep=given.keep, **others)
    return RemoteCheckpoint(checkpoint, trainer, lambda place: driving.store.save(folder, place))
