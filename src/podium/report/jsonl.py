"""metrics.jsonl, rollouts/ and tokens.jsonl: the run's own record, always written; the page is made from it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from podium.ledger import Ledger
from podium.records import EvalReport, Group, StepReport
from podium.report._pieces import Pieces


class Jsonl:
    """Without `pieces` the texts of single tokens are not kept."""

    def __init__(self, ledger: Ledger, pieces: Pieces | None = None) -> None:
        self._ledger, self._pieces = ledger, pieces

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        """The ledger was rewound by the checkpoint."""

    def write(self, report: StepReport) -> None:
        self._ledger.add_line({"step": report.state.step, **_rounded(report.metrics)})
        self._ledger.add_rollouts(report.state.step, list(rollout_lines(report)))
        if self._pieces is not None:
            answers = (rollout.token_ids for group in report.groups for rollout in group.rollouts)
            self._pieces.add(set().union(*answers))

    def evaluated(self, report: EvalReport) -> None:
        line = {
            "step": report.step,
            "policy_version": report.policy_version,
            "eval": True,
            "time/eval_s": report.seconds,
        }
        self._ledger.add_line({**line, **_rounded(report.metrics)})
        self._ledger.add_held_out(report.step, list(held_out_lines(report.groups)))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Nothing is left to write."""

    def fail(self) -> None:
        """Nothing either: events.jsonl has it."""


def rollout_lines(report: StepReport) -> Iterator[dict[str, Any]]:
    """One line a rollout, by (ordinal, sample index, policy version)."""
    sampled = [rollout.rollout_logprobs for group in report.groups for rollout in group.rollouts]
    seen = [_policy_logprobs(report, group, index) for group in report.groups for index in range(len(group.rollouts))]
    logprobs, gaps = _to_digits(sampled, 6), _logprob_gaps(seen, sampled)
    for group in report.groups:
        for index, rollout in enumerate(group.rollouts):
            yield {
                "ordinal": group.prompt.ordinal,
                "sample_index": rollout.sample_index,
                "seed": rollout.seed,
                "policy_version": [rollout.policy_version_min, rollout.policy_version_max],
                "trained": group.prompt.ordinal in report.kept and group.rewards[index] is not None,
                "source": group.prompt.source,
                "prompt": group.prompt.question,
                "answer": group.prompt.answer,
                **judged(group, index),
                "advantage": round(group.advantages[index], 6),
                "token_ids": list(rollout.token_ids),
                "logprobs": next(logprobs),
                **next(gaps),
            }


def held_out_lines(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """One line a rollout of an evaluation."""
    for group in groups:
        for index, rollout in enumerate(group.rollouts):
            yield {
                "ordinal": group.prompt.ordinal,
                "sample_index": rollout.sample_index,
                "prompt": group.prompt.question,
                "answer": group.prompt.answer,
                **judged(group, index),
                "tokens": len(rollout.token_ids),
            }


def judged(group: Group, index: int) -> dict[str, Any]:
    """What a rollout says and what was made of it."""
    return {
        "text": group.rollouts[index].text,
        "reward": group.rewards[index],
        "reward_parts": dict(group.reward_parts[index]),
        "correct": group.correct[index],
        "finish_reason": group.rollouts[index].finish_reason,
    }


def _policy_logprobs(report: StepReport, group: Group, index: int) -> Sequence[float] | None:
    """The trainer's, where the rollout was trained and all are finite."""
    policy = report.policy_logprobs.get((group.prompt.ordinal, group.rollouts[index].digest))
    is_told = policy is not None and group.rewards[index] is not None and all(map(math.isfinite, policy))
    return policy if is_told else None


def _logprob_gaps(
    seen: Sequence[Sequence[float] | None], sampled: Sequence[Sequence[float]]
) -> Iterator[dict[str, list[float]]]:
    """Of each rollout, the trainer's logprobs minus the sampler's. Five digits are enough to see a gap."""
    both = [(policy, own) for policy, own in zip(seen, sampled, strict=True) if policy is not None]
    assert all(len(policy) == len(own) for policy, own in both)
    gaps = _to_digits([policy for policy, _ in both], 5, minus=[own for _, own in both])
    return ({} if policy is None else {"logprob_gaps": next(gaps)} for policy in seen)


def _to_digits(
    lists: Sequence[Sequence[float]], digits: int, minus: Sequence[Sequence[float]] = ()
) -> Iterator[list[float]]:
    """Each list, or its difference to another, with so many digits behind the point. All numbers at once, which is
    seven times as fast as one by one. + 0.0 turns −0.0 into 0.0."""
    flat = np.fromiter(chain.from_iterable(lists), np.float64)
    if minus:
        flat -= np.fromiter(chain.from_iterable(minus), np.float64)
    numbers = iter((np.round(flat, digits) + 0.0).tolist())
    return (list(islice(numbers, len(values))) for values in lists)


def _rounded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Nine digits: enough to compare runs, short enough to read."""
    return {name: float(f"{value:.9g}") for name, value in metrics.items()}
