"""Whether a run is healthy, in plain words, and what to do if it is not.

Every rule looks metrics up by name and skips those that a run does not have, so it works for runs with other parts
(without a queue, or with a user's own metrics).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from podium.report.web.reader import LAPS, Series

RECENT = 20
"""Number of last steps that "recently" means."""
CHECKS = {
    "ParityError": ("engine = trainer", "after each weight sync the engine's logprobs equal the trainer's"),
    "SplitError": ("loss without split", "the loss does not depend on how the batch is split"),
    "RewardContractError": ("rewards keep their contract", "each reward returns what its contract says"),
    "TokenMismatchError": ("ids trained = ids sampled", "the trained token ids are the sampled ones"),
}
USUAL_EVENTS = ("started", "restored", "finished", "stopped", "failed", "rows_left_out", "nothing_trained")
TIME_ADVICE = {
    "rollout": "A faster engine or shorter answers help most.",
    "train": 'trainer.precision = "bfloat16" and pack.shared_prefix help most.',
    "eval": "Evaluate less often (eval.every), or on fewer rows.",
    "checkpoint": "Commit less often (checkpoint.every).",
    "report": "Write reports less often, or fewer of them.",
}


class Verdict(NamedTuple):
    level: Literal["good", "note", "warn", "bad"]
    title: str
    text: str
    advice: str = ""


@dataclass(frozen=True)
class Facts:
    series: Series
    events: Sequence[Mapping[str, Any]]
    status: Mapping[str, Any]
    unreadable: Mapping[str, int] = field(default_factory=dict)
    """Lines that the page leaves out, by file."""

    def recent(self, name: str) -> float | None:
        """Mean over the last `RECENT` steps; None if the run does not have the metric."""
        values = self.series.last(name, RECENT)
        return fmean(values) if values else None

    def early(self, name: str) -> float | None:
        """Mean over the first `RECENT` steps."""
        values = [value for value in self.series.column(name)[:RECENT] if value is not None]
        return fmean(values) if values else None

    def total(self, name: str) -> float:
        return sum(value for value in self.series.column(name) if value)

    def messages(self, event: str) -> list[str]:
        return [str(each.get("message", "")) for each in self.events if each.get("event") == event]


def health(facts: Facts) -> list[Verdict]:
    """The worst first."""
    order = ("bad", "warn", "note", "good")
    verdicts = [verdict for rule in RULES for verdict in rule(facts)]
    return sorted(verdicts, key=lambda verdict: order.index(verdict.level))


def _ending(facts: Facts) -> Iterator[Verdict]:
    state, message = facts.status.get("state"), facts.status.get("message") or ""
    if state == "failed":
        yield Verdict("bad", "The run broke", message, "Fix the cause, then continue with `podium resume`.")
    elif state == "killed":
        text = "status.json says that the run is running, but no process holds its folder."
        yield Verdict("warn", "The run was killed", text, "Continue with `podium resume`: nothing committed is lost.")
    elif state == "stopped":
        yield Verdict("note", "The run was stopped", message or "By a signal.", "Continue with `podium resume`.")


def _unreadable(facts: Facts) -> Iterator[Verdict]:
    if counts := ", ".join(f"{count} of {name}" for name, count in sorted(facts.unreadable.items()) if count):
        text = f"This page leaves out lines that it cannot read: {counts}."
        advice = "A kill during a write leaves one such line; more come from a full disk, a manual edit or a program."
        yield Verdict("note", "Some lines could not be read", text, advice)


def _untrained(facts: Facts) -> Iterator[Verdict]:
    """No step changed the policy, or several steps in a row did not."""
    columns = (facts.series.column(name) for name in ("optim/skipped", "optim/grad_norm"))
    is_idle = [skip == 1.0 or norm == 0.0 for skip, norm in zip(*columns, strict=True) if skip is not None]
    messages = facts.messages("nothing_trained")
    if len(is_idle) > 1 and all(is_idle):
        text = f"None of the {len(is_idle)} steps changed the policy. {messages[-1] if messages else ''}".strip()
        yield Verdict("bad", "Nothing was trained", text, "Look at the rollouts and their rewards.")
    elif messages:
        yield Verdict("note", "Some steps in a row trained nothing", messages[-1])


def _left_out(facts: Facts) -> Iterator[Verdict]:
    for message in dict.fromkeys(facts.messages("rows_left_out")):
        yield Verdict("note", "Rows are left out", message)


def _checks(facts: Facts) -> Iterator[Verdict]:
    failed = [event for event in facts.events if event.get("event") == "failed" and event.get("error") in CHECKS]
    if failed and facts.status.get("state") == "failed":
        title, fact = CHECKS[failed[-1]["error"]]
        text = f"The check that {fact} stopped the run: {failed[-1].get('message', '')}"
        yield Verdict("bad", f"Check failed: {title}", text, "Do not trust what was trained since then.")
    elif len(facts.series):
        every = "; ".join(fact for _, fact in CHECKS.values())
        yield Verdict("good", "All four checks hold", f"At every step: {every}.")


def _learning(facts: Facts) -> Iterator[Verdict]:
    early, late = facts.early("reward/mean"), facts.recent("reward/mean")
    if len(facts.series) < 2 * RECENT or early is None or late is None:
        return
    values = [value for value in facts.series.column("reward/mean") if value is not None]
    span = max(values) - min(values)
    text = f"Mean reward {early:.3g} in the first {RECENT} steps, {late:.3g} in the last {RECENT}."
    if late - early > 0.1 * span:
        yield Verdict("good", "The policy is learning", text)
    elif early - late > 0.1 * span:
        advice = "Lower trainer.lr, add a KL term (loss.kl_beta), and read the worst rollouts."
        yield Verdict("warn", "The reward falls", text, advice)
    else:
        advice = "Check whether groups have signal, whether answers are truncated, and what the best rollouts do."
        yield Verdict("note", "The reward does not change", text, advice)


def _signal(facts: Facts) -> Iterator[Verdict]:
    kept, correct = facts.recent("batch/kept_ratio"), facts.recent("reward/correct_rate")
    if kept is None:
        return
    refills, retired = facts.recent("batch/refills") or 0, facts.recent("batch/retired") or 0
    text = f"Recent steps trained {kept:.0%} of run.prompts_per_step groups"
    text += f", with {refills:.1f} refills per step" if refills else ""
    text += f"; {retired:.0f} rows are retired." if retired else "."
    if kept >= 0.3:
        yield Verdict("good", "Groups have signal", text)
    elif correct is not None and correct > 0.9:
        text += f" {correct:.0%} of the rollouts are correct: the policy solves these prompts."
        yield Verdict("note", "Too easy", text, "Stop here, or use harder prompts.")
    elif correct is not None and correct < 0.1:
        text += f" {correct:.0%} of the rollouts are correct."
        advice = "Use easier prompts, more rollouts_per_prompt, a reward with values between 0 and 1, or a warm start."
        yield Verdict("warn", "Too hard", text, advice)
    else:
        advice = "Raise run.rollouts_per_prompt, or set filter.refill = true."
        yield Verdict("warn", "Few groups have signal", text, advice)


def _failures(facts: Facts) -> Iterator[Verdict]:
    for name, what in (("reward/failed", "reward calls failed"), ("reward/abstained", "rollouts have no reward")):
        total, late = facts.total(name), facts.recent(name)
        if total and late is not None:
            advice = "Test the rewards with `podium check --rewards`; raise timeout_s of slow ones."
            text = f"{late:.1f} per step recently."
            yield Verdict("warn" if late else "note", f"{total:.0f} {what}", text, advice)


def _retries(facts: Facts) -> Iterator[Verdict]:
    for name in facts.series.names:
        if name.endswith(("_retries", "_dropped", "_restarts", "_resampled")) and (total := facts.total(name)):
            late = facts.recent(name) or 0.0
            text = f"{name} is {total:.0f} in total, {late:.1f} per step recently."
            yield Verdict("warn" if late >= 1 else "note", "Work was repeated or dropped", text)


def _truncation(facts: Facts) -> Iterator[Verdict]:
    cut = facts.recent("rollout/truncated_share")
    if cut is not None and cut > 0.2:
        advice = "Raise rollout.max_new_tokens, or penalise length (reward `overlong`, filter.truncated)."
        yield Verdict("warn", "Many answers are truncated", f"{cut:.0%} reach max_new_tokens.", advice)


def _entropy(facts: Facts) -> Iterator[Verdict]:
    early, late = facts.early("policy/entropy"), facts.recent("policy/entropy")
    if not early or late is None or late >= 0.1 * early or len(facts.series) <= RECENT:
        return
    text = f"Entropy fell from {early:.3g} to {late:.3g} nats."
    if (facts.recent("reward/correct_rate") or 0.0) > 0.9:
        yield Verdict("note", "The entropy is low", f"{text} This is expected: the answers are correct.")
    else:
        advice = "Raise the upper bound of loss.clip or rollout.temperature, lower trainer.lr, or add a KL term."
        yield Verdict("warn", "The policy has stopped exploring", text, advice)


def _mismatch(facts: Facts) -> Iterator[Verdict]:
    gap, masked = facts.recent("mismatch/abs_mean"), facts.recent("mismatch/masked_share") or 0.0
    if gap is None:
        return
    outside = facts.recent("mismatch/outside_share") or 0.0
    text = f"Trainer and sampler differ by {gap:.2g} nats per token; {outside:.1%} of the tokens by more than a tenth."
    if outside > 0.1 or masked > 0.1:
        text += f" The correction removes {masked:.1%} of the tokens."
        advice = "Use the same precision on both sides, sync more often, and keep loss.correction on."
        yield Verdict("warn", "Sampler and trainer differ", text, advice)
    else:
        yield Verdict("good", "Sampler and trainer agree", text)


def _distance(facts: Facts) -> Iterator[Verdict]:
    kl = facts.recent("kl/k3")
    if kl is not None and kl > 1.0:
        text = f"The distance to the reference is {kl:.2g} nats per token."
        yield Verdict("warn", "Far from the reference", text, "Raise loss.kl_beta or lower trainer.lr.")


def _gradient(facts: Facts) -> Iterator[Verdict]:
    norms = [value for value in facts.series.column("optim/grad_norm") if value is not None]
    if len(norms) > RECENT:
        usual, peak = median(norms), max(norms[-RECENT:])
        if usual > 0 and peak > 10 * usual:
            text = f"A gradient norm of {peak:.3g}, where {usual:.3g} is usual; it was clipped to max_grad_norm."
            yield Verdict("note", "One gradient was large", text, "Read the rollouts of that step.")


def _skipped(facts: Facts) -> Iterator[Verdict]:
    late = facts.series.last("optim/skipped", RECENT)
    if any(late):
        text = f"{sum(value > 0 for value in late)} of the last {len(late)} steps skipped updates."
        advice = (
            "No group had signal, or the loss or gradient was not finite: check batch/kept_ratio, lower trainer.lr."
        )
        yield Verdict("warn" if fmean(late) > 0.2 else "note", "Steps without an update", text, advice)


def _staleness(facts: Facts) -> Iterator[Verdict]:
    lag = facts.recent("version/lag_max")
    if lag is not None:
        text = f"The oldest rollouts of a step are {lag:.1f} updates behind the weights that they train."
        advice = "Lower run.max_lag or run.sync_every." if lag > 8 else ""
        yield Verdict("warn" if lag > 8 else "good", "Staleness", text, advice)


def _time(facts: Facts) -> Iterator[Verdict]:
    seconds = Counter({stage: facts.recent(f"time/{stage}_s") or 0.0 for stage in LAPS})
    total = sum(seconds.values())
    if not total:
        return
    [(stage, most), *_] = ranked = seconds.most_common(4)
    text = ", ".join(f"{name} {value / total:.0%}" for name, value in ranked if value)
    level = "note" if stage in ("eval", "checkpoint", "report") and most > 0.3 * total else "good"
    yield Verdict(level, f"A step takes {total:.3g} s", f"Recently: {text}.", TIME_ADVICE.get(stage, ""))


def _queues(facts: Facts) -> Iterator[Verdict]:
    late = {name: value for name in facts.series.names if (value := facts.recent(name)) is not None}
    queues = {name.removeprefix("queue/"): value for name, value in late.items() if name.startswith("queue/")}
    waits = {name[5:].removesuffix("_s"): s for name, s in late.items() if name.startswith("time/") and "wait" in name}
    for title, said, unit, found in (
        ("Queues", "Recent average", "", queues),
        ("Waits", "Per step, recently", " s", waits),
    ):
        if found:
            text = ", ".join(f"{name.replace('_', ' ')} {value:.3g}{unit}" for name, value in found.items())
            yield Verdict("good", title, f"{said}: {text}.")


def _workers(facts: Facts) -> Iterator[Verdict]:
    kinds = Counter(str(event.get("event")) for event in facts.events)
    odd = Counter({kind: count for kind, count in kinds.items() if kind not in USUAL_EVENTS})
    if odd:
        text = ", ".join(f"{kind.replace('_', ' ')} {count}" for kind, count in odd.most_common(8))
        yield Verdict("note", "Other events", f"Events: {text}.", "See the events below.")
    if kinds["restored"]:
        yield Verdict("good", f"Resumed {kinds['restored']}×", "Each time from a commit; the history is complete.")


RULES: tuple[Callable[[Facts], Iterator[Verdict]], ...] = (
    _ending, _unreadable, _untrained, _left_out, _checks, _learning, _signal, _failures, _retries, _truncation,
    _entropy, _mismatch, _distance, _gradient, _skipped, _staleness, _time, _queues, _workers,
)  # fmt: skip
