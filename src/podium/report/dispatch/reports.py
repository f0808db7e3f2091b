"""Stage 10: makes each step's report once and hands it to every report that the settings name.

It also warns about steps that trained nothing, and says why.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from podium.errors import InputError
from podium.records import EvalReport, RunState, StepGroups, StepReport, UpdateResult
from podium.report.dispatch.metrics import step_metrics
from podium.run.folder import Ledger, RunFolder, write_atomically
from podium.stages import Report
from podium.terminal import warn


class Reports:
    """`card` describes the run (see `run_card`); `settings` is the text of its settings.toml."""

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
        """`notes`: what the user must know about the run's data before it starts."""
        self._reports, self._folder, self._ledger, self._card = reports, folder, ledger, card
        self._settings, self._max_tokens_per_batch = settings, max_tokens_per_batch
        self._notes, self.idle = notes, IdleSteps()
        self.has_started = False

    async def start(self, state: RunState) -> None:
        """Called after the checkpoint has restored the ledger, so that a rejected resume changes nothing."""
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
        """The run broke: reports that draw must leave the terminal and the page in a clean state."""
        for report in self._reports:
            report.fail()


FIRST_WARNING = 3
"""Steps in a row without an update before the first warning; each further warning waits for twice as many."""

ZERO_GRADIENT = "the gradient is 0: the loss or every advantage is 0, or so small that it rounds to 0"


def is_zero_gradient(metrics: Mapping[str, Any]) -> bool:
    """Whether a step made an update with a gradient of exactly 0."""
    return metrics.get("optim/grad_norm") == 0.0 and not metrics.get("optim/skipped")


def why_idle(step: StepGroups, result: UpdateResult) -> str | None:
    """Why the step did not change the policy; None if it did."""
    if result.updated:
        return ZERO_GRADIENT if is_zero_gradient(result.metrics) else None
    rollouts = [rollout for group in step.drawn for rollout in group.rollouts]
    rewards = [reward for group in step.drawn for reward in group.rewards]
    scored = [reward for reward in rewards if reward is not None]
    if not rollouts:
        return "the engine failed on every prompt"
    if not scored:
        return "no rollout has a reward: every reward failed or abstained"
    if step.kept:
        return "the loss or its gradient was not finite" if result.num_loss_tokens else "no token was left to train on"
    cut = all(rollout.finish_reason == "length" for rollout in rollouts)
    also = "; every answer was cut at rollout.max_new_tokens" if cut else ""
    if not any(group.has_signal for group in step.drawn):
        return _without_signal(step, scored) + also
    if cut:
        return 'every answer was cut at rollout.max_new_tokens, and filter.truncated = "mask" drops such answers'
    return "filter.accept or filter.truncated dropped every group"


def _without_signal(step: StepGroups, scored: list[float]) -> str:
    if not any(sum(reward is not None for reward in group.rewards) > 1 for group in step.drawn):
        return "no group has two rollouts with a reward: most rewards failed or abstained"
    if len({*scored}) == 1:
        return f"every reward is {scored[0]:.4g}"
    return "the rewards within each group are all equal"


class IdleSteps:
    """Counts the steps of this process that trained nothing, by reason."""

    def __init__(self) -> None:
        self._reasons: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._warn_at = FIRST_WARNING

    def seen(self, reason: str | None) -> str | None:
        """Records a step's reason, or None if it trained; returns a warning after enough such steps in a row."""
        if reason is None:
            self._in_a_row.clear()
            self._warn_at = FIRST_WARNING
            return None
        self._reasons[reason] += 1
        self._in_a_row[reason] += 1
        if self._in_a_row.total() < self._warn_at:
            return None
        self._warn_at *= 2
        return f"{self._in_a_row.total()} steps in a row trained nothing: {_listed(self._in_a_row)}. {ADVICE}"

    @property
    def reasons(self) -> str:
        """All reasons so far, the most frequent first."""
        return _listed(self._reasons) if self._reasons else "see reward/mean and batch/kept_ratio of its steps"


ADVICE = (
    "Look at the rollouts on the page; use prompts that the model solves sometimes, more rollouts_per_prompt, a "
    "reward with partial credit, or a higher rollout.max_new_tokens."
)


def _listed(reasons: Counter[str]) -> str:
    if len(reasons) == 1:
        return next(iter(reasons))
    return ", ".join(f"{reason} ({count}×)" for reason, count in reasons.most_common(3))
