"""What each metric is and what a bad value of it means: the one source of the page's tooltips and of docs/metrics.md.

`python -m podium.report.web.glossary > docs/metrics.md` generates the document.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Metric(NamedTuple):
    names: str
    """One name, or several separated by commas; `NAME` stands for a reward's name, `*` for any text."""
    formula: str
    bad: str = ""
    """What a bad value looks like, what it means and what helps; empty if no value is bad."""


class Chapter(NamedTuple):
    title: str
    introduction: str
    metrics: tuple[Metric, ...]


REWARD = Chapter(
    "Reward and rollouts",
    "",
    (
        Metric(
            "reward/mean",
            "mean reward of all rollouts that have a reward, including penalties for truncated ones",
            "flat over many steps: the policy learns nothing; look at the rollouts and at `batch/kept_ratio`",
        ),
        Metric(
            "reward/correct_rate",
            "share of rollouts with the highest possible reward (≥ maximum − 1e-8); only if every reward declares its "
            "range",
            "near 0 or near 1: the prompts are too hard or too easy, and groups carry no signal",
        ),
        Metric(
            "reward/NAME_mean",
            "mean of one reward, unweighted and without penalties",
            "rises while the others fall: the policy may exploit this reward; read its best rollouts",
        ),
        Metric(
            "reward/abstained",
            "rollouts for which no reward returned a number",
            "above 0: the run does not train on these rollouts",
        ),
        Metric(
            "reward/failed",
            "reward calls that raised an error, timed out or crashed their process",
            "above 0: fix the reward or raise its `timeout_s`; above `scoring.max_failed_share` the run stops",
        ),
        Metric(
            "reward/judge_requests, reward/judge_retries",
            "requests that a `judge` sent, and how many of them were retries; `rubric` has the same metrics under its "
            "own name",
            "many retries: the endpoint is overloaded or down",
        ),
        Metric("reward/judge_tokens_in, reward/judge_tokens_out", "token usage that the judge's replies report"),
        Metric("reward/judge_cost", "those tokens times `price_in` and `price_out`"),
        Metric(
            "reward/judge_replies_without_usage",
            "replies that report no token usage; they are missing from the three sums above",
        ),
        Metric(
            "reward/kept_mean, reward/kept_correct_rate, reward/kept_NAME_mean, reward/kept_abstained, "
            "reward/kept_failed",
            "the same metrics over the trained groups only, so after filtering",
        ),
        Metric(
            "rollout/length_mean, rollout/length_max",
            "tokens per answer, including the stop token",
            "grows while the reward does not: the policy rambles; use the reward `overlong`, or average the loss over "
            "rollouts",
        ),
        Metric(
            "rollout/stop_rate",
            "share of rollouts that ended with a stop token",
            "falls: answers are truncated or never end",
        ),
        Metric(
            "rollout/truncated_share",
            "share of rollouts truncated at `max_new_tokens`",
            "above 0.2: rewards judge incomplete answers; raise `rollout.max_new_tokens`, or penalise length",
        ),
        Metric(
            "rollout/retries",
            "times that an engine failed on a prompt of the step and the prompt was sent again",
            "above 0 in many steps: an engine is unhealthy; events.jsonl names it",
        ),
        Metric(
            "rollout/dropped_groups",
            "prompts of the step that failed in every try; they count in no other metric",
            "above 0: the run does not train on those prompts; look for what they have in common",
        ),
        Metric(
            "rollout/tokens_per_s",
            "answer tokens divided by `time/engine_s`; absent if the engine generated nothing since the last report",
        ),
        Metric(
            "engine/paused",
            "times that the in-process engine on a GPU paused a rollout of the step, because there was no memory left "
            "for its keys and values; it was continued later",
            "far above the number of rollouts: tokens are computed again and again; lower `engine.concurrency` or "
            "`pack.max_tokens_per_batch`",
        ),
        Metric(
            "advantage/abs_mean",
            "mean of abs(advantage) over the rollouts of trained groups",
            "near 0: the rewards within a group hardly differ",
        ),
        Metric(
            "batch/kept_ratio",
            "trained groups divided by `prompts_per_step`, or by the groups drawn if those are fewer: how full the "
            "step was",
            "below 0.3: most groups are all right or all wrong; use other data, more rollouts per prompt, or "
            "`filter.refill`",
        ),
        Metric("batch/drawn", "prompts drawn for the step; more than `prompts_per_step` if the step was refilled"),
        Metric(
            "batch/refills",
            "rounds of additional prompts; a round that serves several steps of a window counts for the first step; "
            "the async loop has no rounds, see `batch/drawn`",
            "repeatedly at the limit of `filter.refill`: the data has little signal left",
        ),
        Metric("batch/retired", "rows retired so far by `filter.retire_pass_rate`"),
    ),
)

LOSS = Chapter(
    "Loss and policy",
    "If a step makes several updates, each metric is the mean over them. `lp` is the policy's logprob, `inf` the "
    "sampler's, `old` the policy's before the update; means are over loss tokens.",
    (
        Metric(
            "loss/total",
            "the loss averaged over the step: the sum of the two terms below",
            "its size says little (it is near 0 by construction); if it is not finite, the step is skipped",
        ),
        Metric("loss/policy", "the policy term, with the correction applied"),
        Metric("loss/kl", "the KL term times `kl_beta`; 0 if there is none or it is part of the advantages"),
        Metric(
            "loss/ratio_mean, loss/ratio_var",
            "mean and variance of the loss's ratio; most losses use exp(lp − old), which is exactly 1 with one update "
            "per batch",
            "mean far from 1, or a large variance: the updates of one batch go too far; make fewer updates or lower "
            "the lr",
        ),
        Metric(
            "loss/clipped_low_share, loss/clipped_high_share",
            "share of tokens where a clip bound applies: it removes the gradient; with cispo it caps the weight",
            "above 0.2: many tokens no longer train; make fewer updates per batch, or lower the lr",
        ),
        Metric(
            "policy/entropy",
            "mean entropy of the policy's distribution, in nats, at the sampling temperature",
            "falls to 0 before the reward is high: the policy has stopped exploring; raise the upper bound of "
            "`loss.clip`, the temperature or `kl_beta`",
        ),
        Metric(
            "mismatch/abs_mean",
            "mean of abs(lp − inf): the difference between trainer and sampler before the step's first update; with "
            '`loss.old = "rollout"` and several minibatches, over the first minibatch only',
            "above 0.01 in float32, above 0.1 in bfloat16, or rising: the gradient is that of another policy than the "
            "one that wrote the answers",
        ),
        Metric("mismatch/k1", "mean of inf − lp"),
        Metric(
            "mismatch/k3",
            "mean of exp(lp − inf) − 1 − (lp − inf)",
            "as for `mismatch/abs_mean`; more sensitive to a few large differences",
        ),
        Metric(
            "mismatch/outside_share",
            "share of tokens with exp(lp − inf) outside [0.9, 1.1]",
            "above 0.1: use the same precision on both sides, or sync more often",
        ),
        Metric("mismatch/weight_mean", "mean of the correction's weights; 1 if the correction is off or not needed"),
        Metric(
            "mismatch/masked_share",
            "share of tokens that the correction removes from the loss",
            "above 0.1: a tenth of the generated tokens is wasted",
        ),
        Metric(
            "kl/k1, kl/k2, kl/k3",
            "distance to the reference, with d = lp − ref: mean of d, of d²/2, of exp(−d) − 1 + d; only with a "
            "reference",
            "rises fast: the policy moves away from the reference; raise `kl_beta` or lower the lr",
        ),
        Metric(
            "optim/updates",
            "optimizer steps made: `epochs_per_batch` × `minibatches_per_step`, less the skipped ones",
        ),
        Metric("optim/lr", "learning rate of the update"),
        Metric(
            "optim/grad_norm",
            "norm of the gradient before it is clipped to `max_grad_norm`",
            "ten times its usual size: one batch dominates; look at that step's rollouts",
        ),
        Metric(
            "optim/skipped",
            "share of skipped updates: no group had signal, or the loss or gradient was not finite",
            "above 0 in many steps: the run makes little progress",
        ),
        Metric(
            "pack/batches, pack/tokens",
            "forward passes of the step over all ranks, and the tokens in them, including prompts (once per group with "
            "`pack.shared_prefix`); empty batches that only keep ranks in step do not count",
        ),
        Metric("pack/ratio", "`pack/batches` divided by the packed rollouts: 1 means that packing gained nothing"),
        Metric(
            "pack/fill",
            "`pack/tokens` divided by (`pack/batches` × the largest allowed batch); above 1 if a document is longer "
            "than that",
        ),
        Metric("version/policy", "policy version after the step: the number of steps that updated the policy"),
        Metric(
            "version/lag_mean, version/lag_max",
            "updates between the oldest weights that wrote a rollout and the weights that it trained: mean and maximum "
            "over the step's rollouts",
            "large: rollouts are stale and the correction must do more; lower `run.max_lag` or `run.sync_every`",
        ),
        Metric(
            "version/stale_resampled",
            "async loop: groups since the last step that were more than `run.max_lag` versions old and were sampled "
            "again",
            "above 0 in many steps: the engine does work twice; raise `run.max_lag`",
        ),
        Metric(
            "queue/prompts_in_flight", "async loop: prompts being generated at the moment the step had all its groups"
        ),
        Metric(
            "queue/groups_being_scored",
            "async loop: groups waiting for their rewards at that moment",
            "grows: rewards are slower than generation; there is one reward process per core",
        ),
        Metric("queue/groups_scored_waiting", "async loop: scored groups waiting for a later step at that moment"),
    ),
)

TIME = Chapter(
    "Time",
    "Seconds since the previous step's report; the stages add up to the wall time of a step.",
    (
        Metric(
            "time/rollout_s",
            "waiting for rollouts and rewards, including refills; advantages and filter; in the async loop also "
            "waiting for rollouts in progress before a push",
            "usually most of a step: a faster engine helps most",
        ),
        Metric(
            "time/reward_s",
            "seconds from submission to reward, including queueing, summed over groups; runs at the same time as "
            "generation, so it is not added to the other stages",
            "far above `time/rollout_s`: groups wait for reward workers; there is one per core",
        ),
        Metric("time/pack_s", "packing"),
        Metric("time/train_s", "forward, backward, update"),
        Metric(
            "time/sync_s, time/eval_s, time/checkpoint_s, time/report_s",
            "of the previous step, because these stages follow its report",
        ),
        Metric(
            "time/trainer_waits_s",
            "the trainer had nothing to train: `time/rollout_s`",
            "most of a step: generation limits the run; use a faster engine, or `run.max_lag` above 0",
        ),
        Metric(
            "time/engine_s",
            "time during which the engine had at least one training prompt, from its submission until its group was "
            "complete; overlaps the stages above",
        ),
        Metric(
            "time/engine_waits_s",
            "time during which the engine had no training prompt: the wall time of the step less `time/engine_s`",
        ),
        Metric("time/overlapped_s", "the part of `time/engine_s` during which the trainer trained"),
        Metric(
            "time/overlap",
            "`time/overlapped_s` / min(`time/engine_s`, `time/train_s`): 0 means strictly in turn, 1 means that the "
            "shorter side runs entirely during the longer one. On a CPU, an engine in the trainer's process shares one "
            "thread with it: the number then says that both had work, not that both ran at the same time",
        ),
        Metric("perf/train_tokens_per_s", "`pack/tokens` divided by `time/train_s`"),
    ),
)

ABOUT_EVALUATION = """Lines with `"eval": true`. Each metric is the mean over prompts of the prompt's mean over its
`eval.n` rollouts. `_low` and `_high` are the bounds of its 95 % interval over prompts: Wilson's interval if each
prompt's value is 0 or 1, else a bootstrap (2000 samples, seeded). The rollouts themselves are in `evals/`. Two
evaluations use the same prompts, so even a difference smaller than the intervals may be real: `podium eval A --against
B` tests it."""

EVALUATION = Chapter(
    "Evaluation",
    ABOUT_EVALUATION,
    (
        Metric(
            "eval/accuracy, eval/accuracy_low, eval/accuracy_high",
            "share of correct rollouts: mean@n",
            "falls while `reward/mean` rises: the policy learns the training prompts or exploits the reward, instead "
            "of learning the task",
        ),
        Metric(
            "eval/pass@*, eval/pass@*_low, eval/pass@*_high",
            "chance that one of k rollouts is correct, 1 − C(n−c, k) / C(n, k) with c of n correct, for each k of "
            "`eval.n` and the powers of two below it; prompts with fewer than k scored rollouts are left out",
            "falls while the accuracy rises: the policy has stopped exploring other solutions",
        ),
        Metric("eval/reward_mean, eval/reward_mean_low, eval/reward_mean_high", "mean reward"),
        Metric("eval/verifier/NAME", "mean of one reward, unweighted and without penalties"),
        Metric(
            "eval/source/NAME/accuracy, eval/source/NAME/reward_mean",
            "the same for one `[[eval.data]]` table, if there are several",
        ),
        Metric(
            "eval/stop_rate, eval/stop_rate_low, eval/stop_rate_high",
            "share of rollouts that ended with a stop token",
            "falls: answers are truncated at `rollout.max_new_tokens`",
        ),
        Metric("eval/length_mean, eval/length_max", "tokens per answer"),
        Metric("eval/prompts", "number of held-out prompts"),
        Metric(
            "eval/abstained",
            "rollouts for which no reward returned a number; no metric above counts them",
            "above 0: the evaluation does not cover those rollouts",
        ),
    ),
)

CHAPTERS = (REWARD, LOSS, TIME, EVALUATION)

PREFACE = """# Metrics

`metrics.jsonl` has one line per step with these names. "Loss tokens" are the tokens that the policy wrote in the
trained groups. "Rollouts" without a qualifier are all rollouts of the step, including those of dropped groups. A number
that is not finite is left out. The page shows the same descriptions as tooltips; both come from
[`report/web/glossary.py`](../src/podium/report/web/glossary.py)."""


def names_of(metric: Metric) -> list[str]:
    return metric.names.split(", ")


def explain(name: str) -> Metric | None:
    """The entry of a metric: the one with exactly this name, else the longest name with a placeholder that matches."""
    every = [(own, metric) for chapter in CHAPTERS for metric in chapter.metrics for own in names_of(metric)]
    exact = next((metric for own, metric in every if own == name), None)
    fitting = [(len(own), metric) for own, metric in every if _fits(own, name)]
    return exact or max(fitting, default=(0, None))[1]


def explanations(names: Iterable[str]) -> dict[str, list[str]]:
    """Name → [formula, what a bad value means], for the names that have an entry."""
    return {name: [found.formula, found.bad] for name in names if (found := explain(name)) is not None}


def to_markdown() -> str:
    """The text of docs/metrics.md."""
    parts = [PREFACE]
    for chapter in CHAPTERS:
        rows = [f"| {_code(metric)} | {metric.formula} | {metric.bad} |" for metric in chapter.metrics]
        table = "\n".join(["| name | is | a bad value |", "|---|---|---|", *rows])
        parts += [f"## {chapter.title}", *([chapter.introduction] if chapter.introduction else []), table]
    return "\n\n".join(parts) + "\n"


def _code(metric: Metric) -> str:
    return ", ".join(f"`{name}`" for name in names_of(metric))


def _fits(own: str, name: str) -> bool:
    if "NAME" not in own and "*" not in own:
        return False
    pattern = re.escape(own).replace("NAME", r"[^/]+").replace(r"\*", ".+")
    return re.fullmatch(pattern, name) is not None


if __name__ == "__main__":
    print(to_markdown(), end="")
