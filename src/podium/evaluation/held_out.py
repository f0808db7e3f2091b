"""data → rollout → reward on held-out prompts, with its own sampling settings, and the metrics of the results."""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from podium.evaluation.estimates import Estimate, of_mean, of_share, pass_at_k
from podium.records import EvalReport, Group, Prompt, RunState
from podium.stages import RewardStage, StartRollouts


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
        for k in self.pass_at:
            if shares := list(self._passes(k)):
                made[f"pass@{k}"] = of_share(shares)
        if rewards := list(self.rewards().values()):
            made["reward_mean"] = of_mean(rewards)
        made["stop_rate"] = of_share([fmean(r.finish_reason == "stop" for r in g.rollouts) for g in self.groups])
        made["length_mean"] = of_mean([fmean(len(r.token_ids) for r in g.rollouts) for g in self.groups])
        return made

    def metrics(self) -> dict[str, float]:
        """The flat `eval/*` metrics for the ledger and reports."""
        flat: dict[str, float] = {}
        for name, estimate in self.estimates().items():
            flat[f"eval/{name}"] = estimate.value
            if name != "length_mean":
                flat |= {f"eval/{name}_low": estimate.low, f"eval/{name}_high": estimate.high}
        flat["eval/length_max"] = float(max(len(r.token_ids) for group in self.groups for r in group.rollouts))
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
        names = dict.fromkeys(name for group in self.groups for parts in group.reward_parts for name in parts)
        values = {name: [_known([p.get(name) for p in g.reward_parts]) for g in self.groups] for name in names}
        return {name: fmean(map(fmean, filter(None, each))) for name, each in values.items() if any(each)}

    def by_table(self) -> dict[str, "Results"]:
        """The results per table, if there are several tables."""
        tables = self.tables or {}
        names = dict.fromkeys(tables[group.prompt.ordinal] for group in self.groups) if tables else {}
        if len(names) < 2:
            return {}
        groups = {name: [g for g in self.groups if tables[g.prompt.ordinal] == name] for name in names}
        return {name: Results(those, self.pass_at) for name, those in groups.items()}

    def _passes(self, k: int) -> Iterator[float]:
        """One value per prompt; prompts with fewer than k scored rollouts are left out."""
        for group in self.groups:
            if len(known := _known(group.correct)) >= k:
                yield pass_at_k(len(known), sum(map(int, known)), k)


def _known(values: Sequence[float | None]) -> list[float]:
    return [float(value) for value in values if value is not None]


class HeldOut:
    """Evaluates before the first step, every `every` steps and when `is_over`; passes the report to `tell`."""

    def __init__(
        self,
        rollout: StartRollouts,
        reward: RewardStage,
        prompts: Sequence[Prompt],
        is_over: Callable[[RunState], bool],
        every: int,
        tell: Callable[[EvalReport], None],
        pass_at: Sequence[int] = (),
        tables: Mapping[int, str] | None = None,
        beat: Callable[[str], None] = lambda stage: None,
    ) -> None:
        """`pass_at` and `tables` as in `Results`; `beat` is called for each group, as a sign of progress."""
        self._rollout, self._reward, self._prompts = rollout, reward, prompts
        self._is_over, self._every, self._tell, self._beat = is_over, every, tell, beat
        self._pass_at, self._tables = pass_at, tables

    async def run_if_due(self, state: RunState, since: int) -> None:
        if not self._prompts or not self._is_due(state, since):
            return
        started = time.monotonic()
        groups = await held_out_groups(self._rollout, self._reward, self._prompts, self._beat)
        version = groups[0].rollouts[0].policy_version_max  # the engine's, which may lag behind the trainer
        metrics = Results(groups, self._pass_at, self._tables).metrics()
        self._tell(EvalReport(state.step, version, metrics, time.monotonic() - started, tuple(groups)))

    def _is_due(self, state: RunState, since: int) -> bool:
        """A window may move the step past the exact multiple."""
        passed = self._every > 0 and state.step // self._every > since // self._every
        return state.step == 0 or passed or self._is_over(state)
