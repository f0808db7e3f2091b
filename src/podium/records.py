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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    import torch

FINITE = "finite"
Finite = Annotated[float, FINITE]
"""Neither NaN nor infinite: such a value is rejected when it arrives from another process."""
FinishReason = Literal["stop", "length", "turns", "abort"]
PER_TOKEN = ("token_ids", "position_ids", "loss_mask", "advantages", "rollout_logprobs")  # fields of a Batch
PER_TOKEN += ("old_logprobs", "reference_logprobs")  # these may be None


def ids_digest(token_ids: Sequence[int]) -> str:
    """Fingerprint of token ids: an engine's answer takes it, the trainer checks it before it trains."""
    as_int64 = array("q", token_ids)
    if sys.byteorder == "big":
        as_int64.byteswap()
    return hashlib.blake2b(as_int64.tobytes(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Plan:
    """How much is sampled and trained, and how far sampling may run ahead."""

    steps: int
    """Trainer steps of the whole run."""
    prompts_per_step: int
    rollouts_per_prompt: int
    sync_every: int = 1
    """Steps per policy window; 0 never syncs."""
    max_skipped_steps: int = 50
    """Steps in a row without an update after which the run stops with an error."""
    epochs: int | None = None
    """Passes over the data after which the run ends early; None has no limit."""
    max_refills: int = 0
    """Rounds in which a window draws what its filter dropped; 0: a step is what was drawn first."""
    retire_pass_rate: float | None = None
    """Share of correct rollouts from which on a row is not drawn again; None retires none."""
    max_lag: int = 0
    """Policy versions that a trained rollout may be behind the trainer; 0 is the strict loop, more the async one."""
    in_flight: bool = False
    """Async loop: whether the engine's weights may change while rollouts are being written."""

    @property
    def prompts_per_window(self) -> int:
        """Prompts that are sampled with one set of weights."""
        return self.prompts_per_step * max(1, self.sync_every)

    @property
    def prompts_ahead(self) -> int:
        """Most prompts under way at a time: a window's, or those of `max_lag` steps and of the one that trains."""
        return self.prompts_per_step * (self.max_lag + 1) if self.max_lag else self.prompts_per_window

    @property
    def needs_snapshot(self) -> bool:
        """Whether the trainer moves on while rollouts are written, so that an engine needs weights of its own."""
        return self.max_lag > 0 or self.sync_every != 1

    def window_size(self, step: int) -> int:
        """Prompts of the window that begins after `step` steps; 0 once all are done."""
        return min(self.prompts_per_window, max(0, self.steps - step) * self.prompts_per_step)


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
    opens_thinking: bool = False
    """Whether the rendered prompt ends in <think> or the like, so that the answer begins inside the thinking."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"prompt {self.ordinal} ({self.source or 'data'})"

    @property
    def question(self) -> str:
        """The turn that the policy answers, for people."""
        return next((turn["content"] for turn in reversed(self.messages) if turn["role"] != "assistant"), "")


@dataclass(frozen=True)
class Sampling:
    """How an engine draws the tokens of one rollout."""

    max_new_tokens: int = 256
    temperature: Finite = 1.0
    """0 is greedy."""
    top_k: int | None = None
    top_p: Finite | None = None
    stop_ids: tuple[int, ...] = ()
    """Ids that end a rollout; the id itself is kept and trained."""


@dataclass(frozen=True)
class PrefixGroup:
    """Requests with the same token ids. An engine computes these tokens once and shares their keys and values."""

    name: str
    """Unique among the groups that are under way, such as `train/17`."""
    size: int
    """Requests in the group. The engine frees the shared keys and values after the last of them."""


@dataclass(frozen=True)
class Request:
    """What a rollout stage asks of an engine: one rollout."""

    token_ids: tuple[int, ...]
    """All that the model reads before it writes: the prompt and, in a later turn, what was written before."""
    sampling: Sampling
    """Its `max_new_tokens` is what is left for this request."""
    seed: int
    """The tokens drawn depend on this number and on nothing else that is random."""
    prefix_group: PrefixGroup | None = None
    episode: str | None = None
    """Names requests that continue one another. An engine that keeps their keys and values says so in its traits."""

    @property
    def label(self) -> str:
        """Its name in messages."""
        name = self.episode or (self.prefix_group.name if self.prefix_group is not None else "")
        return f"request {name}" if name else "a request"


@dataclass(frozen=True)
class Answer:
    """What an engine returns for one request."""

    token_ids: tuple[int, ...]
    """The tokens written, including the stop id."""
    logprobs: tuple[float, ...]
    """One per token, of the distribution really sampled from."""
    finish_reason: FinishReason
    policy_versions: tuple[int, int]
    """Of the weights that wrote the first token, and of those that wrote the last token."""
    num_pauses: int = 0
    """Times that the engine took its memory for others; it then computed the tokens again and went on."""
    digest: str = field(init=False)
    """Fingerprint of the ids, taken here, where they are as sampled."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", ids_digest(self.token_ids))


@dataclass(frozen=True)
class EngineTraits:
    """What an engine can do and needs. Callers ask the traits and never the engine's name.

    A class attribute `traits` holds what is known before an engine exists; an instance may replace it with one that
    also knows its precision and its place for weights.
    """

    channels: tuple[str, ...]
    """Sync channels that reach the engine, best first."""
    packages: tuple[str, ...] = ()
    """Python packages that the engine imports and that Podium does not require."""
    candidates: tuple[str, ...] = ()
    """If not empty, this is no engine: names of engines of which a run chooses one before it starts. The first one is
    always installed."""
    dtype: str = "float32"
    """Precision in which the engine computes."""
    weights_root: Path | None = None
    """Folder under which the engine reads published weights; None: anywhere."""
    max_context_tokens: int | None = None
    """Longest prompt and answer together; None: as long as the model's context."""
    transfer_ranks: int = 0
    """GPUs of the engine that can receive weights from the trainer's GPUs (sync channel `nccl`)."""
    shares_weights: bool = False
    """Whether the engine samples in the trainer's process, from the trainer's own weights."""
    runs_in_worker: bool = False
    """Whether a pool, Ray or Flyte can start the engine in a process of its own."""
    plans_threads: bool = False
    """Whether the engine divides the CPU's cores by itself."""
    outlives_run: bool = False
    """Whether the engine goes on after the run. The run calls `claim(run_id, scope)` before it pushes weights."""
    has_members: bool = False
    """Whether the engine consists of several: it has `score_each` and `held_each`, by member."""
    shows_weights: bool = False
    """Whether `held` shows the tensors that the engine samples with, so that each push is proven to the last bit."""
    keeps_order: bool = False
    """Whether the same requests, sent in the same order, give the same bits. The rollout stage then hands groups on by
    ordinal, so that a run repeats bit for bit."""
    keeps_episodes: bool = False
    """Whether keys and values of an episode stay between its requests; otherwise they are computed again."""
    keeps_weights: bool = False
    """Whether a request under way is finished with the weights that it began with, when new weights are loaded."""


@dataclass(frozen=True)
class Observation:
    """What an environment answers to a turn of the policy."""

    messages: tuple[Mapping[str, str], ...] | str = ()
    """What the policy reads next: a text, or messages with `role` and `content`."""
    reward: Finite = 0.0
    """Of this step."""
    done: bool = False
    """Whether the episode is over."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Plain data; its numbers are added up over the episode and stand in the ledger as `counts`."""


@dataclass(frozen=True)
class Span:
    """The tokens of one call of the engine within a rollout."""

    start: int
    """Place of the first token in the rollout's ids."""
    length: int
    seed: int
    policy_versions: tuple[int, int]
    """Of the weights that wrote the first token, and of those that wrote the last token."""
    digest: str
    """`ids_digest` of these tokens as the engine sampled them."""


@dataclass(frozen=True)
class Turn:
    """One message of a conversation, for rewards and people."""

    role: str
    text: str
    seconds: Finite = 0.0
    """That the policy wrote, or that a tool or the environment took."""


@dataclass(frozen=True)
class Rollout:
    """One answer of the policy to a prompt, or one episode of several turns."""

    token_ids: tuple[int, ...]
    """Of the answer only, including the stop id."""
    rollout_logprobs: tuple[float, ...]
    """One per token, of the distribution really sampled from."""
    loss_mask: tuple[int, ...]
    """One per token: 1 where the policy wrote it, 0 where an environment did."""
    finish_reason: FinishReason
    text: str
    """Decoded for rewards and people; never encoded back. Of an episode, the policy's last turn."""
    policy_version_min: int
    policy_version_max: int
    sample_index: int
    seed: int
    digest: str
    """`ids_digest` of the ids as the engine sampled them."""
    spans: tuple[Span, ...] = ()
    """One per call of the engine in an episode; empty if the whole answer came from one call."""
    turns: tuple[Turn, ...] = ()
    """The conversation after the prompt; empty for a single answer."""
    environment_reward: Finite | None = None
    """What the environment gave in all steps; None without an environment."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """What happened in the episode: tool calls, their errors, seconds in tools."""
    failure: str = ""
    """Why the environment failed. Such a rollout has no reward and is never trained."""

    @property
    def num_written(self) -> int:
        """Tokens that the policy wrote, trained or not."""
        return sum(span.length for span in self.spans) if self.spans else len(self.token_ids)


@dataclass(frozen=True)
class Group:
    """A prompt and all its rollouts, or none if an engine failed at it. The tuples have one entry per rollout."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Finite | None, ...] = ()
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
    scoring_s: Finite = 0.0
    """Seconds from submission to reward, including queueing."""
    num_retries: int = 0
    """How often a rollout was requested again because its answer could not be right: the largest count of the group."""
    num_pauses: int = 0
    """Times that an engine paused one of its rollouts for lack of memory, all rollouts together."""

    @property
    def trainable(self) -> list[int]:
        """Places of the rollouts that can be trained: scored, and with a token in the loss."""
        pairs = enumerate(zip(self.rollouts, self.rewards, strict=True))
        return [k for k, (rollout, reward) in pairs if reward is not None and any(rollout.loss_mask)]

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among all rollouts; without rollouts a group is never too old."""
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
    """The state of the prompts under way when the groups of the async loop's next step were complete."""

    num_writing: int
    """Prompts being generated."""
    num_scoring: int
    """Groups whose rewards were not known yet."""
    num_waiting: int
    """Scored groups, without those of the step."""
    num_stale: int
    """Groups found too old since the previous step; their prompts are sampled again."""


@dataclass(frozen=True)
class StepGroups:
    """The groups of one step, with their advantages."""

    prompts_per_step: int
    """Groups that make it full."""
    drawn: tuple[Group, ...] = ()
    """Every group, including dropped ones."""
    kept: tuple[Group, ...] = ()
    """The groups that are trained, as the filter left them."""
    num_refills: int = 0
    """Rounds of additional prompts that were started for the step."""
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
    temperature: Finite
    """Of the sampled distribution; the trainer's logprobs are taken at it too."""
    num_loss_tokens: int
    """Loss tokens of the whole optimizer step, over all batches and ranks."""
    num_rollouts: int
    """Rollouts of the whole optimizer step, over all batches and ranks."""
    answer_starts: tuple[int, ...]
    """One per document: how many of its tokens are the prompt."""
    digests: tuple[str, ...]
    """One per document: the fingerprint of its answer's ids as sampled."""
    ordinals: tuple[int, ...] = ()
    """One per document: its prompt's ordinal, where adjacent documents of one prompt may share its computation."""
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
    """`[T]` with gradient; values outside the loss mask do not count."""
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
    """The trained frontier: every prompt below it was trained, dropped or is pending; none above it was trained."""
    num_rollouts: int = 0
    """Sampled for training so far."""
    num_tokens: int = 0
    """Loss tokens trained so far."""
    num_skipped_steps: int = 0
    """Steps without an update: nothing had signal, or the gradient was not finite."""
    num_skipped_in_a_row: int = 0
    num_dropped_groups: int = 0
    """Prompts on which every attempt of the engine failed."""
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
