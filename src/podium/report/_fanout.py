"""Stage 10: makes the step's report once and gives it to every place where people look."""

from collections.abc import Mapping, Sequence
from typing import Any

from podium.errors import InputError
from podium.ledger import Ledger
from podium.records import EvalReport, RunState, StepGroups, StepReport, UpdateResult
from podium.report._idle import IdleSteps, why_idle
from podium.report._metrics import step_metrics
from podium.run_folder import RunFolder, write_atomically
from podium.stages import Report
from podium.terminal import warn


class Reports:
    """`card` describes the run, see `run_card`; `settings` is the text of its settings.toml."""

    def __init__(
        self,
        reports: Sequence[Report],
        folder: RunFolder,
        ledger: Ledger,
        card: Mapping[str, Any],
        settings: str,
        max_tokens_per_batch: int,
        notes: Sequence[str] = (),
    ) -> None:
        """`notes`: what a person must know of the run's data before it starts."""
        self._reports, self._folder, self._ledger, self._card = reports, folder, ledger, card
        self._settings, self._max_tokens_per_batch = settings, max_tokens_per_batch
        self._notes, self.idle = notes, IdleSteps()
        self.has_started = False

    async def start(self, state: RunState) -> None:
        """After the checkpoint has put the ledger back: a resume that is refused has changed nothing."""
        if state.step > self._card["steps"]:
            raise InputError(f"run.steps = {self._card['steps']}: the run has {state.step} steps already")
        self.has_started = True
        write_atomically(self._folder.settings, self._settings)
        self._folder.event("started", step=state.step)
        for note in self._notes:
            self._folder.event("rows_left_out", message=note)
            warn(note)
        self._folder.write_status("running", state.step, self._card["steps"])
        history = self._ledger.history()
        for report in self._reports:
            report.start(self._card, history)

    async def write(
        self,
        state: RunState,
        step: StepGroups,
        result: UpdateResult,
        seconds: Mapping[str, float],
    ) -> None:
        metrics = step_metrics(state, step, result, seconds, self._max_tokens_per_batch)
        kept = tuple(group.prompt.ordinal for group in step.kept)
        made = StepReport(state, metrics, step.drawn, kept, result.policy_logprobs)
        self._folder.write_status("running", state.step, self._card["steps"])
        for report in self._reports:
            report.write(made)
        if warning := self.idle.seen(why_idle(step, result)):
            self._folder.event("nothing_trained", step=state.step, message=warning)
            warn(f"warning: {warning}")

    def evaluated(self, made: EvalReport) -> None:
        for report in self._reports:
            report.evaluated(made)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for report in self._reports:
            report.finish(summary)

    def fail(self) -> None:
        """The run broke: reports that draw must leave the terminal and the page in order."""
        for report in self._reports:
            report.fail()
