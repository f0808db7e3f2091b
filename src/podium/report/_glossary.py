"""What each metric is and what a bad value of it means: the one source of the page's tooltips and of docs/metrics.md.

`python -m podium.report._glossary > docs/metrics.md` writes the document anew.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple


class Metric(NamedTuple):
    names: str
    """One name, or several with commas; `NAME` stands for a reward's name, `*` for anything."""
    formula: str
    bad: str = ""
    """What a bad value looks like, what it means and what helps; empty where there is none."""


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
            "mean reward of all rollouts that have one, penalties for cut ones included",
            "flat over many steps: nothing is learnt; look at the rollouts and at `batch/kept_ratio`",
        ),
        Metric(
            "reward/correct_rate",
            "share of rollouts with the highest possible reward (≥ maximum − 1e-8); only where every reward declares a "
            "range",
            "near 0 or near 1: prompts too hard or too easy, groups carry no signal",
        ),
        Metric(
            "reward/NAME_mean",
            "mean of one reward, unweighted and without penalties",
            "rises while the others fall: the policy may be gaming it; read its best rollouts",
        ),
        Metric("reward/abstained", "rollouts to which no reward gave a number", "above 0: these rollouts are lost"),
        Metric(
            "reward/failed",
            "reward calls that raised, took too long or took their process down",
            "above 0: mend the reward or raise its `timeout_s`; above `scoring.max_failed_share` the run stops",
        ),
        Metric(
            "reward/judge_requests, reward/judge_retries",
            "requests that a `judge` sent, and those of them that were second or later tries; `rubric` has the same "
            "under its name",
            "many retries: the endpoint is overloaded or down",
        ),
        Metric("reward/judge_tokens_in, reward/judge_tokens_out", "tokens that its replies say they took"),
        Metric("reward/judge_cost", "those tokens times `price_in` and `price_out`"),
        Metric("reward/judge_replies_without_usage", "replies that did not say it, and so are not in the three sums"),
        Metric(
            "reward/kept_mean, reward/kept_correct_rate, reward/kept_NAME_mean, reward/kept_abstained, "
            "reward/kept_failed",
            "the same over the groups that were trained, so after filtering",
        ),
        Metric(
            "rollout/length_mean, rollout/length_max",
            "tokens of an answer, the stop token included",
            "grows without more reward: the policy rambles; see `overlong`, or average the loss over rollouts",
        ),
        Metric(
            "rollout/stop_rate",
            "share of rollouts that ended with a stop token",
            "falls: answers are cut or never end",
        ),
        Metric(
            "rollout/truncated_share",
            "share cut at `max_new_tokens`",
            "above 0.2: rewards judge half answers; raise `rollout.max_new_tokens`, or punish length",
        ),
        Metric(
            "rollout/retries",
            "times that an engine failed at a prompt of the step and was asked again",
            "above 0 in many steps: an engine is ill; events.jsonl names it",
        ),
        Metric(
            "rollout/dropped_groups",
            "prompts of the step that an engine failed at in every try; they count nowhere",
            "above 0: those prompts are lost to the run; look for what they have in common",
        ),
        Metric(
            "rollout/tokens_per_s",
            "answer tokens over the seconds of `time/engine_s`; left out where it wrote nothing since the last report",
        ),
        Metric(
            "advantage/abs_mean",
            "mean of abs(advantage) over the rollouts of trained groups",
            "near 0: rewards of a group hardly differ",
        ),
        Metric(
            "batch/kept_ratio",
            "trained groups over `prompts_per_step`, or over the groups drawn where those are fewer: how full the step "
            "was",
            "below 0.3: most groups are all right or all wrong; other data, more rollouts a prompt, or `filter.refill`",
        ),
        Metric("batch/drawn", "prompts drawn for the step; more than `prompts_per_step` where it was refilled"),
        Metric(
            "batch/refills",
            "rounds of further prompts; one that serves several steps of a window counts for the first; the async loop "
            "has no rounds, see `batch/drawn`",
            "at `filter.max_refills` again and again: the data has little signal left",
        ),
        Metric("batch/retired", "rows retired so far by `filter.retire_pass_rate`"),
    ),
)

LOSS = Chapter(
    "Loss and policy",
    "Means over the step's updates where there are several. With `lp` the policy's logprob, `inf` the sampler's, `old` "
    "the policy's before the update; means over loss tokens.",
    (
        Metric(
            "loss/total",
            "the loss as averaged over the step: the two below",
            "its size says little (it is near 0 by construction); not finite, the step is skipped",
        ),
        Metric("loss/policy", "its policy term, corrected"),
        Metric("loss/kl", "its KL term, times `kl_beta`; 0 where there is none or it is folded into the advantages"),
        Metric(
            "loss/ratio_mean, loss/ratio_var",
            "mean and variance of the ratio that the loss is built on, exp(lp − old) for most; then 1 and 0 with one "
            "update per batch",
            "mean away from 1, or a large variance: updates of one batch go too far; fewer of them, or a lower lr",
        ),
        Metric(
            "loss/clipped_low_share, loss/clipped_high_share",
            "share of tokens where a clip bound binds: it takes the gradient away, or with cispo bounds its weight",
            "above 0.2: most of the batch no longer teaches; fewer updates a batch, or a lower lr",
        ),
        Metric(
            "policy/entropy",
            "mean entropy of the policy's distribution, in nats, at the sampling temperature",
            "falls to 0 before the reward is high: it has stopped trying; raise `clip_high`, the temperature, or a KL",
        ),
        Metric(
            "mismatch/abs_mean",
            "mean of abs(lp − inf): how far trainer and sampler are apart before the step's first update; with "
            '`loss.old = "rollout"` and several minibatches over the first of them',
            "above 0.01 in float32, 0.1 in bfloat16, or rising: the gradient is of another policy than the one that "
            "wrote the answers",
        ),
        Metric("mismatch/k1", "mean of inf − lp"),
        Metric(
            "mismatch/k3", "mean of exp(lp − inf) − 1 − (lp − inf)", "as `mismatch/abs_mean`, and sees rare far ones"
        ),
        Metric(
            "mismatch/outside_share",
            "share of tokens with exp(lp − inf) outside [0.9, 1.1]",
            "above 0.1: use one precision on both sides, or sync more often",
        ),
        Metric("mismatch/weight_mean", "mean of the correction's weights; 1 where it is off or has nothing to do"),
        Metric(
            "mismatch/masked_share",
            "share of tokens that the correction takes out",
            "above 0.1: a tenth of the rollouts is written for nothing",
        ),
        Metric(
            "kl/k1, kl/k2, kl/k3",
            "distance to the reference, d = lp − ref: mean of d, of d²/2, of exp(−d) − 1 + d; only with a reference",
            "rises fast: the policy leaves what it knew; raise `kl_beta` or lower the lr",
        ),
        Metric(
            "optim/updates",
            "optimizer steps made: `epochs_per_batch` × `minibatches_per_step` unless some were skipped",
        ),
        Metric("optim/lr", "learning rate of the update"),
        Metric(
            "optim/grad_norm",
            "norm of the gradient before it is scaled down to `max_grad_norm`",
            "ten times its usual size: one batch pulls far; look at that step's rollouts",
        ),
        Metric(
            "optim/skipped",
            "share of updates not made: nothing had signal, or loss or gradient was not finite",
            "above 0 again and again: the run stands still",
        ),
        Metric(
            "pack/batches, pack/tokens",
            "forward passes of the step over all ranks, and tokens in them, prompts included (once a group with "
            "`pack.shared_prefix`); spare batches, which train nothing, aside",
        ),
        Metric("pack/ratio", "`pack/batches` over the rollouts that were packed: 1 means that packing gained nothing"),
        Metric(
            "pack/fill",
            "`pack/tokens` over `pack/batches` × the largest batch allowed; above 1 where a document is longer than "
            "that",
        ),
        Metric("version/policy", "policy version after the step: the number of steps that updated the policy"),
        Metric(
            "version/lag_mean, version/lag_max",
            "updates between the weights that wrote a rollout's first token and those that it trained: mean and "
            "largest over the step's rollouts",
            "large: rollouts are stale and the correction has more to mend; lower `run.max_lag` or `run.sync_every`",
        ),
        Metric(
            "version/stale_resampled",
            "async loop: groups found more than `run.max_lag` versions old since the last step, and sampled again",
            "above 0 again and again: sampling is done twice; raise `run.max_lag`",
        ),
        Metric("queue/prompts_in_flight", "async loop: prompts that were being written when the step had its groups"),
        Metric(
            "queue/groups_being_scored",
            "groups whose rewards were not known yet, then",
            "grows: rewards are slower than the rest; raise `scoring.workers`",
        ),
        Metric("queue/groups_scored_waiting", "scored groups that waited for a later step, then"),
    ),
)

TIME = Chapter(
    "Time",
    "Seconds since the previous step's report; they add up to the wall time of a step.",
    (
        Metric(
            "time/rollout_s",
            "waiting for rollouts and rewards, refills included; advantages and filter; in the async loop also for "
            "what is being written to be done before a push",
            "most of a step, as a rule: a faster engine pays first",
        ),
        Metric(
            "time/reward_s",
            "from each group's arrival until its rewards are known, summed, waiting for a free worker included; beside "
            "generation, so not added to the others",
            "far above `time/rollout_s`: rewards wait for workers; raise `scoring.workers`",
        ),
        Metric("time/pack_s", "packing"),
        Metric("time/train_s", "forward, backward, update"),
        Metric(
            "time/sync_s, time/eval_s, time/checkpoint_s, time/report_s",
            "of the step before, as they come after its report",
        ),
        Metric(
            "time/trainer_waits_s",
            "the trainer had nothing to train: `time/rollout_s`",
            "most of a step: sampling is what limits the run; a faster engine, or `run.max_lag` above 0",
        ),
        Metric(
            "time/engine_s",
            "a training prompt was with the engine: from its sending until its group was there; beside the stages "
            "above",
        ),
        Metric("time/engine_waits_s", "none was: the wall time of the step less `time/engine_s`"),
        Metric("time/overlapped_s", "the part of `time/engine_s` that fell into `time/train_s`"),
        Metric(
            "time/overlap",
            "`time/overlapped_s` / min(`time/engine_s`, `time/train_s`): 0 strictly in turn, 1 the shorter side hidden "
            "behind the longer. On a CPU an engine in the trainer's process takes turns with it on one thread: then it "
            "says that both had work, not that both did it",
        ),
        Metric("perf/train_tokens_per_s", "`pack/tokens` over `time/train_s`"),
    ),
)

ABOUT_EVALUATION = """Lines with `"eval": true`. Means over prompts of each prompt's mean over its `eval.n` rollouts.
`_low` and `_high` beside a number are its 95 % interval over prompts: Wilson's where each prompt's value is 0 or 1,
else the bootstrap's (2000 samples, seeded). The rollouts themselves are in `evals/`. A difference between two
evaluations that is smaller than the intervals may still be real, as the prompts are the same: `podium eval A --against
B` tells."""

EVALUATION = Chapter(
    "Evaluation",
    ABOUT_EVALUATION,
    (
        Metric(
            "eval/accuracy, eval/accuracy_low, eval/accuracy_high",
            "share of correct rollouts: mean@n",
            "falls while `reward/mean` rises: the policy learns the training prompts, or the reward, and not the task",
        ),
        Metric(
            "eval/pass@*, eval/pass@*_low, eval/pass@*_high",
            "chance that one of k rollouts is correct, 1 − C(n−c, k) / C(n, k) with c of n correct, for each k of "
            "`eval.pass_at`; prompts with fewer than k scored rollouts are left out",
            "falls while the accuracy rises: the policy has stopped to try other ways",
        ),
        Metric("eval/reward_mean, eval/reward_mean_low, eval/reward_mean_high", "mean reward"),
        Metric("eval/verifier/NAME", "mean of one reward, unweighted and without penalties"),
        Metric(
            "eval/source/NAME/accuracy, eval/source/NAME/reward_mean",
            "the same of one `[[eval.data]]` table, where there are several",
        ),
        Metric(
            "eval/stop_rate, eval/stop_rate_low, eval/stop_rate_high",
            "share of rollouts that ended with a stop token",
            "falls: answers are cut at `rollout.max_new_tokens`",
        ),
        Metric("eval/length_mean, eval/length_max", "tokens of an answer"),
        Metric("eval/prompts", "how many held-out prompts"),
        Metric(
            "eval/abstained",
            "rollouts to which no reward gave a number; they count nowhere above",
            "above 0: those rollouts are lost",
        ),
    ),
)

CHAPTERS = (REWARD, LOSS, TIME, EVALUATION)

PREFACE = """# Metrics

A line a step in `metrics.jsonl`, under these names. "Loss tokens" are the tokens that the policy wrote, of the groups
that were trained; "rollouts" without a qualifier are all of the step's, the dropped ones too. A number that is not
finite is left out. The page shows the same words beside each number; both come from
[`report/_glossary.py`](../src/podium/report/_glossary.py)."""


def names_of(metric: Metric) -> list[str]:
    return metric.names.split(", ")


def explain(name: str) -> Metric | None:
    """The entry of a metric: its own, else the longest with a placeholder that fits."""
    every = [(own, metric) for chapter in CHAPTERS for metric in chapter.metrics for own in names_of(metric)]
    exact = next((metric for own, metric in every if own == name), None)
    fitting = [(len(own), metric) for own, metric in every if _fits(own, name)]
    return exact or max(fitting, default=(0, None))[1]


def explanations(names: Iterable[str]) -> dict[str, list[str]]:
    """Name → [formula, what a bad value means], for those that are known."""
    return {name: [found.formula, found.bad] for name in names if (found := explain(name)) is not None}


def to_markdown() -> str:
    """docs/metrics.md."""
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
