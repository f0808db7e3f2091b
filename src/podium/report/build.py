"""Stage 10: makes each step's report once and hands it to every report that the settings name.

In: `[[report]]` and what is known of the run. `Reports` first writes the step to the run's own record, the ledger. It
also warns about steps that trained nothing, and says why. The end of the file computes the metrics of docs/metrics.md.
"""

import importlib.util
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from podium.errors import InputError
from podium.records import EvalReport, Group, Queues, Rollout, RunState, StepGroups, StepReport, UpdateResult
from podium.report.page import Page
from podium.report.web.reader import run_card
from podium.run.folder import Ledger, RunFolder, write_atomically
from podium.settings.contracts import checked, user_code
from podium.settings.lookup import find
from podium.settings.sections import Choice
from podium.settings.tables import Settings
from podium.stages import Report
from podium.untrusted import warn

FIRST_WARNING = 3
"""Steps in a row without an update before the first warning; each further warning waits for twice as many."""
ZERO_GRADIENT = "the gradient is 0: the loss or every advantage is 0, or so small that it rounds to 0"
ADVICE = (
    "Look at the rollouts on the page; use prompts that the model solves sometimes, more rollouts_per_prompt, a "
    "reward with partial credit, or a higher rollout.max_new_tokens."
)


def check_reports(settings: Settings) -> None:
    """A tracker whose package is not installed is an error before the model is loaded."""
    for choice in settings.report:
        package = getattr(find("report", choice.name), "package", None)
        if package is not None and importlib.util.find_spec(package) is None:
            remedy = f"pip install 'podium-rl[{choice.name}]'"
            raise InputError(f"report {choice.name!r} needs {package}, which is not installed: {remedy}")


def build_reports(
    settings: Settings,
    folder: RunFolder,
    ledger: Ledger,
    console_mode: str | None,
    num_steps: int,
    max_tokens_per_batch: int,
    notes: Sequence[str] = (),
    page: type[Page] | None = None,
) -> "Reports":
    """`console_mode` holds for this process only and is not saved with the run. `notes` are sentences about the data.
    `page` is written in place of the report `page`, even where the settings do not name it."""
    made = _chosen_reports(settings, folder, console_mode)
    if page is not None:
        made = [*(report for report in made if not isinstance(report, Page)), page(folder)]
    card = run_card(settings.to_dict(), folder.path, num_steps)
    return Reports(made, folder, ledger, card, settings.to_toml(), max_tokens_per_batch, notes)


def _chosen_reports(settings: Settings, folder: RunFolder, console_mode: str | None) -> list[Any]:
    """A report whose first argument is called `folder` gets the run folder; the console gets its mode."""
    given = list(settings.report)
    if console_mode is not None and all(choice.name != "console" for choice in given):
        given.insert(0, Choice(name="console"))
    made: list[Any] = []
    for choice in given:
        make = find("report", choice.name)
        handed: list[Any] = [folder] if "folder" in inspect.signature(make).parameters else []
        if choice.name == "console":
            handed = [console_mode or "auto"]
        with user_code("report.name", choice.name):
            made.append(checked("report", choice.name, make(*handed, **choice.options)))
    return made


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


def _listed(reasons: Counter[str]) -> str:
    if len(reasons) == 1:
        return next(iter(reasons))
    return ", ".join(f"{reason} ({count}×)" for reason, count in reasons.most_common(3))


@dataclass
class Reports:
    """The report stage of the loop."""

    reports: Sequence[Report]
    folder: RunFolder
    ledger: Ledger
    card: Mapping[str, Any]
    """Describes the run, see `run_card`."""
    settings: str
    """The text of settings.toml."""
    max_tokens_per_batch: int
    notes: Sequence[str] = ()
    """What the user must know about the run's data before it starts."""
    idle: IdleSteps = field(default_factory=IdleSteps)
    has_started: bool = False

    async def start(self, state: RunState) -> None:
        """Called after the checkpoint has restored the ledger, so that a rejected resume changes nothing."""
        if state.step > self.card["steps"]:
            raise InputError(f"run.steps = {self.card['steps']}: the run has {state.step} steps already")
        self.has_started = True
        write_atomically(self.folder.settings, self.settings)
        self.folder.event("started", step=state.step)
        for note in self.notes:
            self.folder.event("rows_left_out", message=note)
            warn(note)
        self.folder.write_status("running", state.step, self.card["steps"])
        history = self.ledger.history()
        for report in self.reports:
            report.start(self.card, history)

    async def write(
        self, state: RunState, step: StepGroups, result: UpdateResult, seconds: Mapping[str, float]
    ) -> None:
        metrics = step_metrics(state, step, result, seconds, self.max_tokens_per_batch)
        kept = tuple(group.prompt.ordinal for group in step.kept)
        made = StepReport(state, metrics, step.drawn, kept, result.policy_logprobs)
        self.folder.write_status("running", state.step, self.card["steps"])
        self.ledger.write(made)
        for report in self.reports:
            report.write(made)
        if warning := self.idle.seen(why_idle(step, result)):
            self.folder.event("nothing_trained", step=state.step, message=warning)
            warn(f"warning: {warning}")

    def evaluated(self, made: EvalReport) -> None:
        self.ledger.evaluated(made)
        for report in self.reports:
            report.evaluated(made)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for report in self.reports:
            report.finish(summary)

    def fail(self) -> None:
        """The run broke: reports that draw must leave the terminal and the page in a clean state."""
        for report in self.reports:
            report.fail()


def is_zero_gradient(metrics: Mapping[str, Any]) -> bool:
    """Whether a step made an update with a gradient of exactly 0."""
    return metrics.get("optim/grad_norm") == 0.0 and not metrics.get("optim/skipped")


def why_idle(step: StepGroups, result: UpdateResult) -> str | None:
    """Why the step did not change the policy; None if it did."""
    if result.updated:
        return ZERO_GRADIENT if is_zero_gradient(result.metrics) else None
    rollouts = [rollout for group in step.drawn for rollout in group.rollouts]
    scored = [reward for group in step.drawn for reward in group.rewards if reward is not None]
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
    return f"every reward is {scored[0]:.4g}" if len({*scored}) == 1 else "the rewards within each group are all equal"


def step_metrics(
    state: RunState, step: StepGroups, result: UpdateResult, seconds: Mapping[str, float], max_tokens_per_batch: int
) -> dict[str, float]:
    """`state` is the state after the step.

    Values that are not finite (the gradient of a skipped step) are left out: JSON cannot express them.
    """
    groups, kept = step.drawn, step.kept
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [rollout.num_written for rollout in rollouts]
    trained_version = state.policy_version - result.updated
    lags = [trained_version - rollout.policy_version_min for rollout in rollouts]
    counted = sorted({name for group in groups for name in group.reward_counts})
    metrics = {
        **group_metrics("reward/", groups),
        **group_metrics("reward/kept_", kept),
        **{f"reward/{name}": float(sum(group.reward_counts.get(name, 0.0) for group in groups)) for name in counted},
        "rollout/length_mean": _mean(lengths),
        "rollout/length_max": float(max(lengths, default=0)),
        "rollout/stop_rate": _mean(float(rollout.finish_reason == "stop") for rollout in rollouts),
        "rollout/truncated_share": _mean(float(rollout.finish_reason == "length") for rollout in rollouts),
        **({"rollout/tokens_per_s": sum(lengths) / seconds["engine"]} if seconds.get("engine") else {}),
        **episode_metrics(rollouts),
        "advantage/abs_mean": _mean(abs(a) for group in kept for a in group.advantages),
        "rollout/retries": float(sum(group.num_retries for group in groups)),
        "engine/paused": float(sum(group.num_pauses for group in groups)),
        "rollout/dropped_groups": float(sum(not group.rollouts for group in groups)),
        "batch/kept_ratio": len(kept) / min(step.prompts_per_step, len(groups)),
        "batch/drawn": float(len(groups)),
        "batch/refills": float(step.num_refills),
        "batch/retired": float(len(state.retired)),
        **result.metrics,
        **pack_metrics(kept, result.metrics, max_tokens_per_batch),
        "version/policy": float(state.policy_version),
        "version/lag_mean": _mean(lags),
        "version/lag_max": float(max(lags, default=0)),
        **queue_metrics(step.queues),
        **{f"time/{stage}_s": value for stage, value in seconds.items()},
        **overlap_metrics(seconds),
        "time/reward_s": sum(group.scoring_s for group in groups),
        "perf/train_tokens_per_s": result.metrics.get("pack/tokens", 0.0) / max(1e-9, seconds.get("train", 0.0)),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def group_metrics(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward, share of correct rollouts, mean per reward, and how many rewards abstained or failed."""
    rewards = [reward for group in groups for reward in group.rewards]
    correct = [float(value) for group in groups for value in group.correct if value is not None]
    parts = [part for group in groups for part in group.reward_parts]
    return {
        f"{prefix}mean": _mean(reward for reward in rewards if reward is not None),
        **({f"{prefix}correct_rate": _mean(correct)} if correct else {}),
        **{
            f"{prefix}{name}_mean": _mean(value for part in parts if (value := part.get(name)) is not None)
            for name in sorted({name for part in parts for name in part})
        },
        f"{prefix}abstained": float(rewards.count(None)),
        f"{prefix}failed": float(sum(sum(group.reward_failures.values()) for group in groups)),
    }


def episode_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What happened in conversations; empty for single answers."""
    episodes = [rollout for rollout in rollouts if rollout.spans or rollout.failure]
    if not episodes:
        return {}
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts.update(episode.counts)
    calls = counts["tool_calls"]
    return {
        "episodes/turns_mean": _mean(len(episode.spans) for episode in episodes),
        "episodes/read_tokens_mean": _mean(len(episode.token_ids) - episode.num_written for episode in episodes),
        "episodes/tool_calls_mean": calls / len(episodes),
        **({"episodes/tool_error_share": counts["tool_errors"] / calls} if calls else {}),
        "episodes/tool_s_mean": counts["tool_s"] / len(episodes),
        "episodes/environment_s_mean": counts["environment_s"] / len(episodes),
        "episodes/out_of_turns_share": _mean(float(episode.finish_reason == "turns") for episode in episodes),
        "episodes/failed": float(sum(bool(episode.failure) for episode in episodes)),
    }


def pack_metrics(kept: Sequence[Group], trained: Mapping[str, float], max_tokens_per_batch: int) -> dict[str, float]:
    """How well the step's rollouts filled batches; empty if none was trained."""
    rollouts = sum(len(group.trainable) for group in kept)
    batches = trained.get("pack/batches", 0.0)
    if not rollouts or not batches:
        return {}
    return {"pack/ratio": batches / rollouts, "pack/fill": trained["pack/tokens"] / (batches * max_tokens_per_batch)}


def queue_metrics(queues: Queues | None) -> dict[str, float]:
    """For the async loop only: the strict loop has no work in progress besides its step."""
    if queues is None:
        return {}
    return {
        "version/stale_resampled": float(queues.num_stale),
        "queue/prompts_in_flight": float(queues.num_writing),
        "queue/groups_being_scored": float(queues.num_scoring),
        "queue/groups_scored_waiting": float(queues.num_waiting),
    }


def overlap_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """The share of the shorter side's work, engine or trainer, that ran at the same time as the other side's."""
    shorter = min(seconds.get("engine", 0.0), seconds.get("train", 0.0))
    return {"time/overlap": seconds.get("overlapped", 0.0) / shorter} if shorter > 0 else {}


def _mean(values: Iterable[float]) -> float:
    """0 for no values: a step without kept groups has no mean."""
    listed = list(values)
    return fmean(listed) if listed else 0.0
