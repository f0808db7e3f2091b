"""`podium eval`: held-out results as text, as data for a file, and as a comparison of two models."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from podium.errors import InputError
from podium.evaluation.estimates import Comparison, Estimate, compare
from podium.evaluation.held_out import Results
from podium.report.jsonl import judged

LOWEST, HIGHEST = 3, 2
"""How many rollouts with the lowest and the highest rewards the sample table shows."""
SHOWN_CHARACTERS = 90


def as_text(results: Results) -> str:
    """Numbers with their 95 % intervals, tables of verifiers and sources, and a few rollouts."""
    head = ("", "value", "95 % interval")
    rows = [(name, f"{each.value:.4g}", _interval(each)) for name, each in results.estimates().items()]
    groups = results.groups
    longest = max(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    n = len(groups[0].rollouts)
    each = "1 rollout each" if n == 1 else f"{n} rollouts each (accuracy is mean@{n})"
    facts = f"{len(groups)} prompts, {each}, longest answer {longest} tokens"
    parts = [_table([head, *rows]) + f"\n{facts}", _table([("verifier", "mean"), *_verifier_rows(results)])]
    if by_table := results.by_table():
        parts.append(_table([("source", "prompts", "accuracy", "reward"), *map(_source_row, by_table.items())]))
    return "\n\n".join([*parts, _samples(results)])


def as_data(results: Results) -> dict[str, Any]:
    """Everything, for a file: metrics, intervals, tables and every rollout."""
    return {
        "metrics": results.metrics(),
        "intervals": {name: asdict(each) for name, each in results.estimates().items()},
        "verifiers": results.verifiers(),
        "sources": {
            name: {number: asdict(each) for number, each in part.estimates().items()}
            for name, part in results.by_table().items()
        },
        "prompts": [
            {
                "ordinal": group.prompt.ordinal,
                "source": (results.tables or {}).get(group.prompt.ordinal, group.prompt.source),
                "prompt": group.prompt.question,
                "answer": group.prompt.answer,
                "rollouts": [
                    {**judged(group, index), "tokens": len(rollout.token_ids)}
                    for index, rollout in enumerate(group.rollouts)
                ],
            }
            for group in results.groups
        ],
    }


def compared(first: Results, second: Results) -> tuple[str, Comparison]:
    """("accuracy" or "reward", the comparison) on the prompts that both have: by accuracy if known, else by reward."""
    for what, one, other in (
        ("accuracy", first.accuracies(), second.accuracies()),
        ("reward", first.rewards(), second.rewards()),
    ):
        both = [ordinal for ordinal in one if ordinal in other]
        if both:
            return what, compare([one[ordinal] for ordinal in both], [other[ordinal] for ordinal in both])
    raise InputError("nothing to compare: there is no prompt for which both models have a scored rollout")


def verdict(what: str, made: Comparison, first: str, second: str) -> str:
    """The comparison in plain words."""
    gap = made.difference
    counts = f"on {made.only_first} prompts {first} does better, on {made.only_second} {second}"
    if not made.only_first and not made.only_second:
        return f"the same {what} on every one of {made.num_prompts} prompts"
    test = "" if made.p_value is None else f", p = {made.p_value:.2g} by McNemar's exact test"
    numbers = (
        f"{what} differs by {gap.value:+.4f} (95 % {_interval(gap)}) over {made.num_prompts} prompts; {counts}{test}"
    )
    if not made.is_told_apart:
        return f"no significant difference: {numbers}. It may be chance; use more prompts to decide"
    better = first if gap.value > 0 else second
    return f"{better} is better: {numbers}"


def comparison_data(what: str, made: Comparison, said: str) -> dict[str, Any]:
    return {"of": what, **asdict(made), "is_told_apart": made.is_told_apart, "verdict": said}


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.4g} to {estimate.high:.4g}"


def _verifier_rows(results: Results) -> list[tuple[str, str]]:
    return [(name, f"{value:.4g}") for name, value in results.verifiers().items()]


def _source_row(item: tuple[str, Results]) -> tuple[str, ...]:
    name, results = item
    made = results.estimates()
    cells = [
        f"{made[key].value:.4g} ({_interval(made[key])})" if key in made else "–" for key in ("accuracy", "reward_mean")
    ]
    return name, str(len(results.groups)), *cells


def _samples(results: Results) -> str:
    """A table of the rollouts with the lowest and the highest rewards."""
    scored = [
        (reward, group.prompt, rollout.text)
        for group in results.groups
        for reward, rollout in zip(group.rewards, group.rollouts, strict=True)
        if reward is not None
    ]
    scored.sort(key=lambda each: each[0])
    shown = scored if len(scored) <= LOWEST + HIGHEST else [*scored[:LOWEST], *scored[-HIGHEST:]]
    rows = [(f"{r:.4g}", _short(p.question), _short(str(p.answer)), _short(text)) for r, p, text in shown]
    return _table([("reward", "prompt", "expected", "answer"), *rows])


def _short(text: str) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 1]}…"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def results_file(model: str, settings: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """What `--out` writes: the model, the evaluation's settings and the results."""
    asked = {key: settings[key] for key in ("eval", "rollout", "reward", "scoring") if key in settings}
    return {"model": model, "settings": asked, **as_data(results)}
