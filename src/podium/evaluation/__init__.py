"""Held-out prompts: rollouts with their own sampling settings, the metrics, and how certain the numbers are.

The loop evaluates with `HeldOut`; `podium eval` prints `as_text`, writes `results_file` and compares two models.
The unit is a prompt: its rollouts share its difficulty, so they are averaged first, and prompts are resampled. All
intervals are 95 % intervals, and seeded: the same results give the same interval.
"""

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from podium.errors import InputError
from podium.records import EvalReport, Group, Prompt, RunState
from podium.run.folder import judged
from podium.stages import RewardStage, StartRollouts
from podium.untrusted import aligned

Z = 1.959963984540054
"""The normal distribution's 97.5 % point."""
ALPHA = 0.05
RESAMPLES = 2000
CHUNK = 1_000_000
"""Random numbers per batch, which limits memory."""
LOWEST, HIGHEST = 3, 2
"""How many rollouts with the lowest and the highest rewards the sample table shows."""
SHOWN_CHARACTERS = 90


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Two models on the same prompts: the first minus the second."""

    difference: Estimate
    num_prompts: int
    only_first: int
    """Prompts on which the first did better."""
    only_second: int
    p_value: float | None
    """McNemar's exact test if each prompt is right or wrong; else None."""

    @property
    def is_significant(self) -> bool:
        """By the test if there is one, else if the interval excludes 0."""
        if self.p_value is not None:
            return self.p_value < ALPHA
        return not self.difference.low <= 0 <= self.difference.high


@dataclass(frozen=True)
class HeldOut:
    """Evaluates before the first step, every `every` steps and when `is_over`; passes the report to `tell`."""

    rollout: StartRollouts
    reward: RewardStage
    prompts: Sequence[Prompt]
    is_over: Callable[[RunState], object]
    every: int
    tell: Callable[[EvalReport], None]
    pass_at: Sequence[int] = ()
    tables: Mapping[int, str] | None = None
    """As in `Results`, like `pass_at`."""
    beat: Callable[[str], None] = lambda stage: None
    """Called for each group, as a sign of progress."""

    async def run_if_due(self, state: RunState, since: int) -> None:
        """`since` is the step of the last call: a window may move the step past the exact multiple of `every`."""
        has_passed = self.every > 0 and state.step // self.every > since // self.every
        if not self.prompts or not (state.step == 0 or has_passed or self.is_over(state)):
            return
        started = time.monotonic()
        groups = await held_out_groups(self.rollout, self.reward, self.prompts, self.beat)
        version = groups[0].rollouts[0].policy_version_max  # the engine's, which may lag behind the trainer
        metrics = Results(groups, self.pass_at, self.tables).metrics()
        self.tell(EvalReport(state.step, version, metrics, time.monotonic() - started, tuple(groups)))


async def held_out_groups(
    rollout: StartRollouts,
    reward: RewardStage,
    prompts: Sequence[Prompt],
    beat: Callable[[str], None] = lambda stage: None,
) -> list[Group]:
    """The scored rollouts of every prompt; prompts on which an engine failed are left out."""

    async def written() -> AsyncIterator[Group]:
        async for group in rollout(prompts):
            beat("evaluation")
            yield group

    return [group async for group in reward.score_each(written()) if group.rollouts]


@dataclass(frozen=True)
class Results:
    """Scored groups and their metrics; each metric is the mean over prompts of the mean over rollouts."""

    groups: Sequence[Group]
    pass_at: Sequence[int] = ()
    """The k of pass@k."""
    tables: Mapping[int, str] | None = None
    """Ordinal → the table of the settings that the prompt belongs to."""

    def estimates(self) -> dict[str, Estimate]:
        """Estimates under the names of docs/metrics.md; those without any value are left out."""
        made: dict[str, Estimate] = {}
        if correct := list(self.accuracies().values()):
            made["accuracy"] = of_share(correct)
        known = [_known(group.correct) for group in self.groups]
        for k in self.pass_at:
            # Prompts with fewer than k scored rollouts are left out.
            if shares := [pass_at_k(len(each), int(sum(each)), k) for each in known if len(each) >= k]:
                made[f"pass@{k}"] = of_share(shares)
        if rewards := list(self.rewards().values()):
            made["reward_mean"] = of_mean(rewards)
        made["stop_rate"] = of_share([fmean(r.finish_reason == "stop" for r in g.rollouts) for g in self.groups])
        made["length_mean"] = of_mean([fmean(r.num_written for r in g.rollouts) for g in self.groups])
        return made

    def metrics(self) -> dict[str, float]:
        """The flat `eval/*` metrics for the ledger and reports."""
        flat: dict[str, float] = {}
        for name, estimate in self.estimates().items():
            flat[f"eval/{name}"] = estimate.value
            if name != "length_mean":
                flat |= {f"eval/{name}_low": estimate.low, f"eval/{name}_high": estimate.high}
        flat["eval/length_max"] = float(max(r.num_written for group in self.groups for r in group.rollouts))
        flat["eval/prompts"] = float(len(self.groups))
        flat["eval/abstained"] = float(sum(reward is None for group in self.groups for reward in group.rewards))
        flat |= {f"eval/verifier/{name}": value for name, value in self.verifiers().items()}
        for table, results in self.by_table().items():
            for name, each in results.estimates().items():
                if name in ("accuracy", "reward_mean"):
                    flat[f"eval/source/{table}/{name}"] = each.value
        for group in self.groups:
            for name, value in group.reward_counts.items():
                flat[f"eval/{name}"] = flat.get(f"eval/{name}", 0.0) + value
        return flat

    def accuracies(self) -> dict[int, float]:
        """Ordinal → share of correct rollouts, for prompts that have one."""
        return {g.prompt.ordinal: fmean(known) for g in self.groups if (known := _known(g.correct))}

    def rewards(self) -> dict[int, float]:
        """Ordinal → mean reward, for prompts that have one."""
        return {g.prompt.ordinal: fmean(known) for g in self.groups if (known := _known(g.rewards))}

    def verifiers(self) -> dict[str, float]:
        """Mean of each reward over its prompts, unweighted."""
        means: dict[str, list[float]] = {}
        for group in self.groups:
            for name in dict.fromkeys(name for parts in group.reward_parts for name in parts):
                if known := _known([parts.get(name) for parts in group.reward_parts]):
                    means.setdefault(name, []).append(fmean(known))
        return {name: fmean(values) for name, values in means.items()}

    def by_table(self) -> dict[str, "Results"]:
        """The results per table, if there are several tables."""
        tables = self.tables or {}
        names = dict.fromkeys(tables[group.prompt.ordinal] for group in self.groups) if tables else {}
        if len(names) < 2:
            return {}
        groups = {name: [g for g in self.groups if tables[g.prompt.ordinal] == name] for name in names}
        return {name: Results(those, self.pass_at) for name, those in groups.items()}


def _known(values: Sequence[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


def pass_at_k(num_rollouts: int, num_correct: int, k: int) -> float:
    """The unbiased estimate that at least one of k drawn rollouts is correct: 1 − C(n−c, k) / C(n, k)."""
    return 1.0 - math.comb(num_rollouts - num_correct, k) / math.comb(num_rollouts, k)


def wilson(num_successes: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share. Unlike mean ± error it stays within 0 … 1, even for small counts."""
    share = num_successes / count
    centre = share + Z * Z / (2 * count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale)


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """The middle 95 % of the means of samples drawn with replacement."""
    table, random = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    at_a_time = max(1, CHUNK // len(table))
    means = [
        table[random.integers(0, len(table), (min(at_a_time, RESAMPLES - done), len(table)))].mean(axis=1)
        for done in range(0, RESAMPLES, at_a_time)
    ]
    low, high = np.percentile(np.concatenate(means), [100 * ALPHA / 2, 100 * (1 - ALPHA / 2)])
    return float(low), float(high)


def of_share(values: Sequence[float]) -> Estimate:
    """The estimate of a share from each prompt's share.

    Wilson's interval if every value is 0 or 1, or all are equal (a bootstrap would then claim certainty); else the
    bootstrap's.
    """
    mean = fmean(values)
    is_plain = all(value in (0.0, 1.0) for value in values) or len(set(values)) == 1
    return Estimate(mean, *(wilson(mean * len(values), len(values)) if is_plain else bootstrap(values)))


def of_mean(values: Sequence[float]) -> Estimate:
    """The estimate of any other mean, with the bootstrap's interval."""
    return Estimate(fmean(values), *bootstrap(values))


def compare(first: Sequence[float], second: Sequence[float]) -> Comparison:
    """Both sequences have one value per prompt, for the same prompts in the same order."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    is_plain = all(value in (0.0, 1.0) for value in (*first, *second))
    p_value = mcnemar(better, worse) if is_plain else None
    return Comparison(of_mean(differences), len(differences), better, worse, p_value)


def mcnemar(only_first: int, only_second: int) -> float:
    """The p-value of the split of prompts that only one of the two models solves, if both were equally good.

    Exact: a two-sided binomial test of a fair coin.
    """
    count, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(count, i) for i in range(fewer + 1))
    return min(1.0, 2 * tail / 2**count)


def as_text(results: Results) -> str:
    """Numbers with their 95 % intervals, tables of verifiers and sources, and a few rollouts."""
    head = ("", "value", "95 % interval")
    rows = [(name, f"{each.value:.4g}", _interval(each)) for name, each in results.estimates().items()]
    groups = results.groups
    longest = max(rollout.num_written for group in groups for rollout in group.rollouts)
    n = len(groups[0].rollouts)
    each = "1 rollout each" if n == 1 else f"{n} rollouts each (accuracy is mean@{n})"
    facts = f"{len(groups)} prompts, {each}, longest answer {longest} tokens"
    verifiers = [(name, f"{value:.4g}") for name, value in results.verifiers().items()]
    parts = [aligned([head, *rows]) + f"\n{facts}", aligned([("verifier", "mean"), *verifiers])]
    if by_table := results.by_table():
        sources = [_source_row(name, part) for name, part in by_table.items()]
        parts.append(aligned([("source", "prompts", "accuracy", "reward"), *sources]))
    return "\n\n".join([*parts, _samples(results)])


def results_file(model: str, settings: Mapping[str, Any], results: Results) -> dict[str, Any]:
    """What `--out` writes: the model, the evaluation's settings, metrics, intervals, tables and every rollout."""
    return {
        "model": model,
        "settings": {
            key: settings[key]
            for key in ("eval", "rollout", "tool", "environment", "reward", "scoring")
            if key in settings
        },
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
                    {**judged(group, index), "tokens": rollout.num_written}
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
    if not made.is_significant:
        return f"no significant difference: {numbers}. It may be chance; use more prompts to decide"
    better = first if gap.value > 0 else second
    return f"{better} is better: {numbers}"


def comparison_data(what: str, made: Comparison, said: str) -> dict[str, Any]:
    return {"of": what, **asdict(made), "is_significant": made.is_significant, "verdict": said}


def _interval(estimate: Estimate) -> str:
    return f"{estimate.low:.4g} to {estimate.high:.4g}"


def _source_row(name: str, results: Results) -> tuple[str, ...]:
    found = [results.estimates().get(key) for key in ("accuracy", "reward_mean")]
    cells = [f"{each.value:.4g} ({_interval(each)})" if each else "–" for each in found]
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
    return aligned([("reward", "prompt", "expected", "answer"), *rows])


def _short(text: str) -> str:
    shown = repr(text)[1:-1]
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[: SHOWN_CHARACTERS - 1]}…"
