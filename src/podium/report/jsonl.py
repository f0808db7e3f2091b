"""metrics.jsonl, rollouts/ and tokens.jsonl: the run's own record, always written; the page is made from it.

tokens.jsonl holds the text of every token id that the run has generated, so that the page can show rollouts token by
token. It grows with the vocabulary in use, not with the run, and is not part of what a checkpoint verifies.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from podium.records import EvalReport, Group, StepReport
from podium.remote.files import read_regular
from podium.run.folder import Ledger


class Pieces:
    """Writes tokens.jsonl. `decode` returns the text of one id and is called once per id."""

    def __init__(self, path: Path, decode: Callable[[int], str]) -> None:
        self._path, self._decode = path, decode
        self._known: set[int] | None = None

    def add(self, token_ids: Set[int]) -> None:
        if self._known is None:
            self._known = set(read_pieces(self._path))
        new = sorted(token_ids - self._known)
        if not new:
            return
        self._known.update(new)
        with self._path.open("a", encoding="ascii") as file:
            # The line break comes first: a kill may have truncated the previous line.
            file.write("\n" + json.dumps({str(i): self._decode(i) for i in new}))


def read_pieces(path: Path) -> dict[int, str]:
    """Token texts by id. Lines that are truncated or have another format are skipped."""
    pieces: dict[int, str] = {}
    try:
        lines = read_regular(path).splitlines()
    except OSError:
        return pieces
    for line in lines:
        try:
            pieces |= {int(i): str(text) for i, text in json.loads(line).items()} if line else {}
        except (ValueError, AttributeError, RecursionError):
            continue
    return pieces


def piece_decoder(tokenizer: Any) -> Callable[[int], str]:
    """From one id to its text. A tokenizer that marks spaces with ▁ drops a leading space when it decodes one token.

    Uses the fast tokenizer inside transformers' own if there is one: it is five times as fast and changes no spaces.
    """
    beneath = getattr(tokenizer, "backend_tokenizer", None) or tokenizer

    def decode(token_id: int) -> str:
        text = beneath.decode([token_id], skip_special_tokens=False)
        raw = tokenizer.convert_ids_to_tokens(token_id)
        return f" {text}" if str(raw or "").startswith("▁") and not text.startswith(" ") else text

    return decode


class Jsonl:
    """Without `pieces`, no tokens.jsonl is written."""

    def __init__(self, ledger: Ledger, pieces: Pieces | None = None) -> None:
        self._ledger, self._pieces = ledger, pieces

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        """Nothing to do: the checkpoint has already rewound the ledger."""

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
        """Nothing to do: every step is already on disk."""

    def fail(self) -> None:
        """Nothing to do: events.jsonl records the failure."""


def rollout_lines(report: StepReport) -> Iterator[dict[str, Any]]:
    """One line per rollout, ordered by prompt and sample index. `logprob_gaps` are the trainer's logprobs minus the
    sampler's; five digits are enough to see a gap."""
    rows = [(group, index) for group in report.groups for index in range(len(group.rollouts))]
    sampled = [group.rollouts[index].rollout_logprobs for group, index in rows]
    seen = [_policy_logprobs(report, group, index) for group, index in rows]
    both = [(policy, own) for policy, own in zip(seen, sampled, strict=True) if policy is not None]
    assert all(len(policy) == len(own) for policy, own in both)
    logprobs = _to_digits(sampled, 6)
    gaps = _to_digits([policy for policy, _ in both], 5, minus=[own for _, own in both])
    for (group, index), policy in zip(rows, seen, strict=True):
        rollout = group.rollouts[index]
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
            **({} if policy is None else {"logprob_gaps": next(gaps)}),
        }


def held_out_lines(groups: Sequence[Group]) -> Iterator[dict[str, Any]]:
    """One line per rollout of an evaluation."""
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
    """A rollout's text, reward and finish reason."""
    return {
        "text": group.rollouts[index].text,
        "reward": group.rewards[index],
        "reward_parts": dict(group.reward_parts[index]),
        "correct": group.correct[index],
        "finish_reason": group.rollouts[index].finish_reason,
    }


def _policy_logprobs(report: StepReport, group: Group, index: int) -> Sequence[float] | None:
    """The trainer's logprobs; None if the rollout was not trained or one of them is not finite."""
    policy = report.policy_logprobs.get((group.prompt.ordinal, group.rollouts[index].digest))
    is_known = policy is not None and group.rewards[index] is not None and all(map(math.isfinite, policy))
    return policy if is_known else None


def _to_digits(
    lists: Sequence[Sequence[float]], digits: int, minus: Sequence[Sequence[float]] = ()
) -> Iterator[list[float]]:
    """Each list, minus the matching list of `minus` if given, rounded to `digits` decimals.

    Rounds all numbers at once, which is seven times as fast as one by one. `+ 0.0` turns −0.0 into 0.0.
    """
    flat = np.fromiter(chain.from_iterable(lists), np.float64)
    if minus:
        flat -= np.fromiter(chain.from_iterable(minus), np.float64)
    numbers = iter((np.round(flat, digits) + 0.0).tolist())
    return (list(islice(numbers, len(values))) for values in lists)


def _rounded(metrics: Mapping[str, float]) -> dict[str, float]:
    """Nine significant digits: enough to compare runs, short enough to read."""
    return {name: float(f"{value:.9g}") for name, value in metrics.items()}
