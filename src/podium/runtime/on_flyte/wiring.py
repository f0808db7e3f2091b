"""Inside the driver's task: from settings to a run whose rollouts, rewards and training steps are tasks.

The driver reads the data and holds the ledger, the reports and the checkpoints; of the model it has the tokenizer.
"""

import asyncio
import html
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from podium.data.build import RunData, build_run_data
from podium.engine.build import fitted
from podium.model.load import load_reader
from podium.records import RunState
from podium.remote.codec import to_json
from podium.report.page import Page
from podium.reward.build import check_retirement, check_scoring, scoring_recipe
from podium.run.build import check_space
from podium.run.folder import RunFolder
from podium.runtime.on_flyte import tasks
from podium.runtime.on_flyte.driver import Driving
from podium.runtime.on_flyte.replica import Job, with_base
from podium.runtime.on_flyte.sdk import Dir, report
from podium.runtime.on_flyte.stages import (
    Engines,
    RemoteRollout,
    RemoteTrainer,
    Sender,
    Stored,
    remote_score,
    step_of_reply,
)
from podium.runtime.wiring.stages import Placed, Wired, read_rows
from podium.runtime.wiring.stages import wire as wire_stages
from podium.settings.tables import Settings
from podium.sync.build import probe_ids

FRAME = '<iframe srcdoc="{page}" style="width:100%;height:95vh;border:0" title="Podium"></iframe>'
"""A page is a whole document with its own content policy; Flyte puts what it is given inside another document."""


@dataclass(frozen=True)
class Read:
    """What the driver knows before a model is loaded anywhere."""

    tokenizer: Any
    data: RunData
    job: Job


def read(settings: Settings, run_id: str, base: Dir) -> Read:
    """Checks the settings and reads the data, as runtime `local` does."""
    rows = read_rows(settings)
    reader = load_reader(asyncio.run(with_base(settings, base)).model)
    data = build_run_data(settings, *rows, reader)
    job = Job(
        run_id=run_id,
        settings=fitted(settings, data.longest_prompt),
        steps=data.plan.steps,
        longest_prompt=max(data.train.lengths),
        probe=tuple(probe_ids(settings, data.train.in_order)),
        scoring=scoring_recipe(settings, data.sources),
    )
    return Read(reader.tokenizer, data, job)


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
    """`replicas` is the largest number of rollout containers."""
    known = read(settings, driving.run_id, driving.base)
    data = known.data
    sender, engines = Sender(to_json(known.job), driving.base, folder), Engines()
    scoring = known.job.scoring.build(elsewhere=remote_score(sender))
    check_scoring(scoring, data.sources)
    check_retirement(settings, scoring, data.train)
    start, said = step_of_reply(asyncio.run(sender.send(tasks.open_trainer, {}, base=driving.base)))
    assert said.memory is not None
    check_space(settings, folder, said.memory, step)
    trainer = RemoteTrainer(sender, start, data.plan)

    def restored(state: RunState, place: Path | None) -> None:
        """Stores the checkpoint of a resume again: an attempt that ends before its first commit must not lose it."""
        trainer.is_at(state)
        if place is not None:
            driving.store.save(folder, place)

    per_task = {"train": prompts_per_task, "eval": None}
    counts = {"train": data.plan.rollouts_per_prompt, "eval": settings.eval.n}
    placed = Placed(
        data=data,
        tokenizer=known.tokenizer,
        scoring=scoring,
        rollout=lambda purpose: (
            RemoteRollout(sender, engines, replicas, purpose, counts[purpose], per_task[purpose]).start
        ),
        engine=engines,
        trainer=trainer,
        train=trainer.step,
        sync=Stored(trainer, engines),
        memory=said.memory,
        base_digest=said.base_digest,
        restored=restored,
        store=partial(driving.store.save, folder),
        page=LiveReport,
    )
    return wire_stages(settings, folder, placed, stop_requested, step, console_mode)


class LiveReport(Page):
    """The run's page, also shown live by Flyte in the report of the driver's task."""

    def _write(self) -> None:
        super()._write()
        page = self._folder.page.read_text(encoding="utf-8")
        report.current_report().get_tab("main").replace(FRAME.format(page=html.escape(page)))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # the loop is over
            with suppress(Exception):  # a report that cannot be shown stops no run
                report.flush()
            return
        sending = asyncio.ensure_future(report.flush.aio(), loop=loop)
        sending.add_done_callback(lambda done: done.cancelled() or done.exception())
