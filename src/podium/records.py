"""What travels between the stages, in the order it is made.

Row → Prompt → Request → Answer → Rollout → Group → StepGroups → Batch → LossOutput → UpdateResult → StepReport. All are
frozen; a stage that adds something makes a new record. In a Batch every tensor is flat over tokens, `[T]`.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from podium.plan import Plan as Plan

if TYPE_CHECKING:
    import torch

FinishReason = Literal["stop", "length", "abort"]
PER_TOKEN = ("token_ids", "position_ids", "loss_mask", "advantages", "rollout_logprobs")  # fields of a Batch
PER_TOKEN += ("old_logprobs", "reference_logprobs")  # these may be None


def ids_digest(token_ids: Sequence[int]) -> str:
    """Fingerprint of token ids: an engine's answer takes it, the trainer checks it before it trains."""
    as_int64 = array("q", token_ids)
    if sys.byteorder == "big":
        as_int64.byteswap()
    return hashlib.blake2b(as_int64.tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class ReferenceSettings:
    """How the reference of a KL term moves; with alpha 0 it stays the model that the run began with."""

    alpha: float = 0.0
    """Share of the policy taken over each time."""
    every: int = 1
    """Steps between two times."""


@dataclass(frozen=True)
class Row:
    """One row of a data source, before it is rendered and given its place in the run."""

    messages: tuple[Mapping[str, str], ...]
    """Chat turns, each with `role` and `content`."""
    answer: Any = None
    """What the verifier compares with."""
    reward: tuple[str, ...] = ()
    """Names of the rewards that score this row; empty: those of the settings."""
    source: str = ""
    """Which `[[data]]` table it came from."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_text(cls, text: str, **others: Any) -> Row:
        """A row with a single user turn."""
        return cls(messages=({"role": "user", "content": text},), **others)


@dataclass(frozen=True)
class Prompt:
    """One row of data with its place in the run."""

    ordinal: int
    """Monotone over the run and never reused: the identity of the prompt."""
    token_ids: tuple[int, ...]
    """The rendered prompt, as the engine gets it."""
    messages: tuple[Mapping[str, str], ...] = ()
    answer: Any = None
    reward: tuple[str, ...] = ()
    source: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    opens_thinking: bool = (
        False  # the rendered prompt ends in <think> or the like: the answer begins inside the thinking
    )

    @property
    def question(self) -> str:
        """The turn that the policy answers, for people."""
        return next((turn["content"] for turn in reversed(self.messages) if turn["role"] != "assistant"), "")


@dataclass(frozen=True)
class Sampling:
    """How an engine draws tokens."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    top_p: float | None = None
    stop_ids: tuple[int, ...] = ()
    """Ids that end a rollout; the id itself is kept and trained."""


@dataclass(frozen=True)
class Request:
    """What a rollout stage asks of an engine: several answers to one prompt."""

    key: int
    """Unique in one call of `generate`; the answer carries it back."""
    token_ids: tuple[int, ...]
    seeds: tuple[int, ...]
    """One a rollout. The tokens drawn depend on it and on nothing else that is random."""


@dataclass(frozen=True)
class Answer:
    """What an engine returns for one request; the outer tuples have one entry a seed."""

    key: int
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    """One a token, of the distribution really sampled from."""
    finish_reasons: tuple[FinishReason, ...]
    policy_versions: tuple[tuple[int, int], ...]
    """One a rollout: of the weights that wrote its first token, and of those that wrote its last."""
    digests: tuple[str, ...] = field(init=False)
    """One a rollout: the fingerprint of its ids, taken here, where they are as sampled."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digests", tuple(ids_digest(ids) for ids in self.token_ids))


@dataclass(frozen=True)
class Rollout:
    """One answer of the policy to a prompt."""

    token_ids: tuple[int, ...]
    """Of the answer only; the stop id included."""
    rollout_logprobs: tuple[float, ...]
    """One a token, of the distribution really sampled from."""
    loss_mask: tuple[int, ...]
    """One a token: 1 where the policy wrote it, 0 where an environment did."""
    finish_reason: FinishReason
    text: str
    """Decoded for rewards and people; never encoded back."""
    policy_version_min: int
    policy_version_max: int
    sample_index: int
    seed: int
    digest: str
    """`ids_digest` of the ids as the engine sampled them."""


@dataclass(frozen=True)
class Group:
    """A prompt and its rollouts, whole or, where an engine failed at it, none. The tuples have one entry a rollout."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float | None, ...] = ()
    """None: every reward abstained, the rollout counts nowhere."""
    reward_parts: tuple[Mapping[str, float | None], ...] = ()
    """Unweighted value by reward name."""
    correct: tuple[bool | None, ...] = ()
    """Whether the reward is the highest possible; None where no highest is declared."""
    reward_failures: Mapping[str, int] = field(default_factory=dict)
    """Why calls gave no value (`reward: error: message`, `reward: timeout after 10 s`), and how often."""
    reward_counts: Mapping[str, float] = field(default_factory=dict)
    """What rewards counted on the way, such as a judge's tokens."""
    advantages: tuple[float, ...] = ()
    """0 for a rollout without a reward."""
    scoring_s: float = 0.0
    """Seconds until its rewards were known, waiting for a free worker included."""
    num_retries: int = 0
    """Times that the prompt was sent again because an engine's answer could not be right."""

    @property
    def trainable(self) -> list[int]:
        """Places of the rollouts that can be trained: scored, and with a token in the loss."""
        pairs = enumerate(zip(self.rollouts, self.rewards, strict=True))
        return [k for k, (rollout, reward) in pairs if reward is not None and any(rollout.loss_mask)]

    @property
    def oldest_version(self) -> int:
        """Of the weights that wrote the first token of its first rollout; without rollouts it is never too old."""
        return min((rollout.policy_version_min for rollout in self.rollouts), default=sys.maxsize)

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ: compared exactly, since equal rewards can have a tiny float deviation."""
        scored = [reward for reward in self.rewards if reward is not None]
        return len(scored) > 1 and min(scored) != max(scored)

    @property
    def pass_rate(self) -> float:
        """Share of correct rollouts among the scored ones; 0 where fewer than two are known to be correct or not."""
        known = [correct for correct in self.correct if correct is not None]
        return sum(known) / len(known) if len(known) > 1 else 0.0


@dataclass(frozen=True)
class Queues:
    """Where the prompts under way stood when the async loop had its next step together."""

    num_writing: int
    """Prompts whose rollouts were being written."""
    num_scoring: int
    """Groups whose rewards were not known yet."""
    num_waiting: int
    """Scored groups, those of the step aside."""
    num_stale: int
    """Groups that were found too old since the step before, and are sampled again."""


@dataclass(frozen=True)
class StepGroups:
    """The groups of one step, with their advantages."""

    prompts_per_step: int
    """Groups that make it full."""
    drawn: tuple[Group, ...] = ()
    """Every group, the dropped ones too."""
    kept: tuple[Group, ...] = ()
    """Those that are trained, as the filter left them."""
    num_refills: int = 0
    """Rounds of further prompts that were started for it."""
    queues: Queues | None = None
    """None in the strict loop."""

    def plus(self, drawn: Sequence[Group], kept: Sequence[Group]) -> StepGroups:
        return replace(self, drawn=(*self.drawn, *drawn), kept=(*self.kept, *kept))


@dataclass(frozen=True)
class Batch:
    """Documents (prompt + answer) packed into one row. `x[t]` belongs to `token_ids[t]` and is 0 on prompt tokens."""

    token_ids: torch.Tensor
    """int64 `[T]`"""
    position_ids: torch.Tensor
    """int64 `[T]`, restarts at 0 with each document."""
    document_ids: torch.Tensor
    """int64 `[T]`, 0 … N−1, which document a token belongs to."""
    cu_seqlens: torch.Tensor
    """int32 `[N+1]`, where each document starts, and the end."""
    loss_mask: torch.Tensor
    """float32 `[T]`, 1 on tokens that the policy wrote."""
    advantages: torch.Tensor
    """float32 `[T]`"""
    rollout_logprobs: torch.Tensor
    """float32 `[T]`, the sampler's."""
    temperature: float
    """Of the sampled distribution; the trainer's logprobs are taken at it too."""
    num_loss_tokens: int
    """Loss tokens of the whole optimizer step, over all batches and ranks."""
    num_rollouts: int
    """Rollouts of the whole optimizer step, over all batches and ranks."""
    answer_starts: tuple[int, ...]
    """One a document: how many of its tokens are the prompt."""
    digests: tuple[str, ...]
    """One a document: the fingerprint of its answer's ids as sampled."""
    ordinals: tuple[int, ...] = ()
    """One a document: its prompt's ordinal, where adjacent documents of one prompt may share its computation."""
    minibatch: int = 0
    """Which update of the step it belongs to; "the whole optimizer step" above is that update."""
    old_logprobs: torch.Tensor | None = None
    """float32 `[T]`, the policy's before the first update; None: one update, so they are its own, detached."""
    reference_logprobs: torch.Tensor | None = None
    """float32 `[T]`, the reference's; None: no KL."""

    @property
    def num_documents(self) -> int:
        return len(self.digests)

    def documents(self, first: int, last: int) -> Batch:
        """Documents first … last − 1 as a batch of their own; the step's totals stay."""
        start, end = int(self.cu_seqlens[first]), int(self.cu_seqlens[last])
        return replace(
            self,
            **{name: value[start:end] for name in PER_TOKEN if (value := getattr(self, name)) is not None},
            document_ids=self.document_ids[start:end] - first,
            cu_seqlens=self.cu_seqlens[first : last + 1] - start,
            answer_starts=self.answer_starts[first:last],
            digests=self.digests[first:last],
            ordinals=self.ordinals[first:last],
        )

    def to(self, device: torch.device | str) -> Batch:
        """The same batch there; `cu_seqlens` stays on the CPU, where documents are counted and cut."""
        tensors = {name: value for name in (*PER_TOKEN, "document_ids") if (value := getattr(self, name)) is not None}
        return replace(self, **{name: value.to(device) for name, value in tensors.items()})


@dataclass(frozen=True)
class PolicyLoss:
    """What a loss file returns: the policy term of each token, before correction, KL and average."""

    per_token: torch.Tensor
    """`[T]` with gradient; what stands outside the loss mask does not count."""
    ratio: torch.Tensor
    """`[T]`, the probability ratio that the loss is built on, detached."""
    clipped_low: torch.Tensor
    """bool `[T]`, where the lower clip bound took the gradient away."""
    clipped_high: torch.Tensor
    """bool `[T]`, where the upper one did."""
    penalty: torch.Tensor | None = None
    """`[T]` with gradient, added to the policy term after the correction."""


@dataclass(frozen=True)
class LossOutput:
    """The loss of one batch and its per-token statistics."""

    loss: torch.Tensor
    """Scalar with gradient: this batch's share of the step's loss, so that shares add up over batches and ranks."""
    policy_loss: torch.Tensor
    """Scalar, the share without the KL term."""
    kl_loss: torch.Tensor
    """Scalar, the share of the KL term, times its weight."""
    weights: torch.Tensor
    """`[T]`, the correction's weights; 1 where it is off."""
    drift: torch.Tensor | None
    """`[T]`, policy − reference logprobs, detached; None without a reference."""
    ratio: torch.Tensor
    """`[T]`, policy over old probability, detached."""
    clipped_low: torch.Tensor
    """bool `[T]`, where the lower clip bound took the gradient away."""
    clipped_high: torch.Tensor
    """bool `[T]`, where the upper one did."""


@dataclass(frozen=True)
class UpdateResult:
    """What a trainer step did."""

    updated: bool
    """Whether the weights changed; the policy version rises by one if so."""
    num_loss_tokens: int
    metrics: Mapping[str, float]
    """`loss/*`, `optim/*`, `mismatch/*`, `pack/*`, by the names of docs/metrics.md."""
    policy_logprobs: Mapping[tuple[int, str], Sequence[float]] = field(default_factory=dict)
    """By ordinal and digest: the trainer's logprobs of this rank's rollouts, as the first pass over them saw them."""


@dataclass(frozen=True)
class RunState:
    """Where a run stands; all of it is in every checkpoint."""

    step: int = 0
    """Trainer steps done."""
    policy_version: int = 0
    next_ordinal: int = 0
    """The trained frontier: every prompt below it was trained or dropped but the pending ones, none above it was."""
    num_rollouts: int = 0
    """Sampled for training so far."""
    num_tokens: int = 0
    """Loss tokens trained so far."""
    num_skipped_steps: int = 0
    """Steps without an update: nothing had signal, or the gradient was not finite."""
    num_skipped_in_a_row: int = 0
    num_dropped_groups: int = 0  # prompts that an engine failed at in every try
    retired: tuple[int, ...] = ()
    """Rows that are not drawn again, by index, sorted."""
    pending: tuple[int, ...] = ()
    """Ordinals below the frontier that are still to be trained, sorted: others that were drawn later came first."""

    def after(self, step: StepGroups, result: UpdateResult) -> RunState:
        """The counts once a step has been trained; its frontier is the data's business."""
        return replace(
            self,
            step=self.step + 1,
            policy_version=self.policy_version + result.updated,
            num_rollouts=self.num_rollouts + sum(len(group.rollouts) for group in step.drawn),
            num_tokens=self.num_tokens + result.num_loss_tokens * result.updated,
            num_skipped_steps=self.num_skipped_steps + (not result.updated),
            num_dropped_groups=self.num_dropped_groups + sum(not group.rollouts for group in step.drawn),
            num_skipped_in_a_row=0 if result.updated else self.num_skipped_in_a_row + 1,
        )


@dataclass(frozen=True)
class EvalReport:
    """Held-out accuracy at one moment of the run."""

    step: int
    policy_version: int
    metrics: Mapping[str, float]
    """`eval/*`"""
    seconds: float
    groups: tuple[Group, ...] = ()
    """Every held-out prompt with its rollouts, scored."""


@dataclass(frozen=True)
class StepReport:
    """All that a report may show of a step."""

    state: RunState
    """After the step."""
    metrics: Mapping[str, float]
    groups: tuple[Group, ...]
    """Every group of the step, the dropped ones too."""
    kept: tuple[int, ...]
    """Ordinals of the groups that were trained."""
    policy_logprobs: Mapping[tuple[int, str], Sequence[float]] = field(default_factory=dict)
    """As in `UpdateResult`."""
