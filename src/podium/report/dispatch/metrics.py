"""The metrics of a step, under the names of docs/metrics.md."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from podium.records import Group, Queues, RunState, StepGroups, UpdateResult


def step_metrics(
    state: RunState,
    step: StepGroups,
    result: UpdateResult,
    seconds: Mapping[str, float],
    max_tokens_per_batch: int,
) -> dict[str, float]:
    """`state` is the state after the step.

    Values that are not finite (the gradient of a skipped step) are left out: JSON cannot express them.
    """
    groups, kept = step.drawn, step.kept
    tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    metrics = {
        **group_metrics("reward/", groups),
        **group_metrics("reward/kept_", kept),
        **{f"reward/{name}": value for name, value in count_metrics(groups).items()},
        **rollout_metrics("rollout", groups),
        **({"rollout/tokens_per_s": tokens / seconds["engine"]} if seconds.get("engine") else {}),
        "advantage/abs_mean": _mean(abs(a) for group in kept for a in group.advantages),
        "rollout/retries": float(sum(group.num_retries for group in groups)),
        "rollout/dropped_groups": float(sum(not group.rollouts for group in groups)),
        "engine/paused": float(sum(group.num_pauses for group in groups)),
        "batch/kept_ratio": len(kept) / min(step.prompts_per_step, len(groups)),
        "batch/drawn": float(len(groups)),
        "batch/refills": float(step.num_refills),
        "batch/retired": float(len(state.retired)),
        **result.metrics,
        **pack_metrics(kept, result.metrics, max_tokens_per_batch),
        "version/policy": float(state.policy_version),
        **lag_metrics(groups, state.policy_version - result.updated),
        **queue_metrics(step.queues),
        **{f"time/{stage}_s": value for stage, value in seconds.items()},
        **overlap_metrics(seconds),
        "time/reward_s": sum(group.scoring_s for group in groups),
        "perf/train_tokens_per_s": result.metrics.get("pack/tokens", 0.0) / max(1e-9, seconds.get("train", 0.0)),
    }
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def group_metrics(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    """Mean reward, share of correct rollouts, mean per reward, and how many rewards abstained or failed."""
    correct = [value for group in groups for value in group.correct if value is not None]
    names = sorted({name for group in groups for part in group.reward_parts for name in part})
    parts = {
        f"{prefix}{name}_mean": _mean(
            value for group in groups for part in group.reward_parts if (value := part.get(name)) is not None
        )
        for name in names
    }
    return {
        f"{prefix}mean": _mean(reward for group in groups for reward in group.rewards if reward is not None),
        **({f"{prefix}correct_rate": _mean(map(float, correct))} if correct else {}),
        **parts,
        f"{prefix}abstained": float(sum(reward is None for group in groups for reward in group.rewards)),
        f"{prefix}failed": float(sum(sum(group.reward_failures.values()) for group in groups)),
    }


def count_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Sums of the counts that rewards report themselves."""
    names = sorted({name for group in groups for name in group.reward_counts})
    return {name: float(sum(group.reward_counts.get(name, 0.0) for group in groups)) for name in names}


def rollout_metrics(prefix: str, groups: Sequence[Group]) -> dict[str, float]:
    """Lengths in tokens, and how the rollouts ended."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return {
        f"{prefix}/length_mean": _mean(lengths),
        f"{prefix}/length_max": float(max(lengths, default=0)),
        f"{prefix}/stop_rate": _mean(float(rollout.finish_reason == "stop") for rollout in rollouts),
        f"{prefix}/truncated_share": _mean(float(rollout.finish_reason == "length") for rollout in rollouts),
    }


def pack_metrics(kept: Sequence[Group], trained: Mapping[str, float], max_tokens_per_batch: int) -> dict[str, float]:
    """How well the step's rollouts filled batches; empty if none was trained."""
    rollouts = sum(len(group.trainable) for group in kept)
    batches = trained.get("pack/batches", 0.0)
    if not rollouts or not batches:
        return {}
    return {"pack/ratio": batches / rollouts, "pack/fill": trained["pack/tokens"] / (batches * max_tokens_per_batch)}


def lag_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Versions between the oldest weights that wrote a rollout and the weights that it trained."""
    lags = [version - rollout.policy_version_min for group in groups for rollout in group.rollouts]
    return {"version/lag_mean": _mean(lags), "version/lag_max": float(max(lags, default=0))}


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
