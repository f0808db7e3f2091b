"""One Protocol per stage, in pipeline order, and `Stages`, the bundle that a runtime hands to the loop.

A stage knows the records that it takes and returns, and not where it runs: the object here may be the real one
(runtime `local`), an actor or a task. A stage never imports another stage; it gets what it needs when it is built.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from podium.observer import Observer
from podium.records import (
    Answer,
    Batch,
    EngineTraits,
    EvalReport,
    Group,
    LossOutput,
    PolicyLoss,
    Prompt,
    Request,
    RunState,
    StepGroups,
    StepReport,
    UpdateResult,
)

if TYPE_CHECKING:
    import torch


class Data(Protocol):
    """Stage 1. Prompts in an order that depends on the seed alone."""

    def draw(self, state: RunState, count: int, under_way: Collection[int] = ()) -> list[Prompt]:
        """The next prompts, without those whose ordinals are `under_way`; fewer where the data ends."""
        ...

    def advance(self, state: RunState, groups: Sequence[Group], under_way: Collection[int] = ()) -> RunState:
        """The state once these groups are done; it remembers what is still `under_way`, to be drawn after a resume."""
        ...

    def end(self, state: RunState) -> str | None:
        """Why the run is over, for people; None while it is not."""
        ...


OnTokens = Callable[[Sequence[int]], None]
"""Called in the event loop with token ids that were written since the last call."""


class Engine(Protocol):
    """Token ids in, token ids and logprobs out, one rollout per call.

    Any number of requests may be under way at the same time, each with its own sampling; the engine batches whatever is
    outstanding. Random numbers depend on the request's seed alone. Its constructor takes the policy and whether the
    engine needs a snapshot of the weights, and by these names, where it has them: `compute_dtype`, the precision of the
    trainer's matrix products; `overlaps`, whether it may write while the trainer steps; `in_flight`, whether weights
    may change while it writes; `cache_bytes`, the memory that its keys and values may take; `on_event`, which reports
    what happens to it.
    """

    traits: EngineTraits
    policy_version: int | None
    """Of the weights that it holds; None before the first load."""

    def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Awaitable[Answer]:
        """The answer to one request. Cancelling the call frees what it occupied. `on_tokens` receives all tokens of the
        answer, in one or several calls."""
        ...

    def release(self, name: str) -> None:
        """The prefix group or episode of that name ends; an engine may free what it keeps for it."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of `token_ids[1:]` at temperature 1, through the weights that it samples with."""
        ...

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes the trainer's weights; tokens written from now on are of `version`."""
        ...

    async def load_folder(self, folder: Path, version: int) -> None:
        """The same from a published folder (model/handoff.py), checked first: on an error it keeps what it has."""
        ...

    def close(self) -> None:
        """Ends what it started; called when the run ends, however it does."""
        ...


StartRollouts = Callable[[Sequence[Prompt]], AsyncIterator[Group]]
"""The method `start` of a rollout stage. Prompts in, groups of rollouts out. It starts all prompts at once.
Groups arrive by ordinal if the engine keeps order, otherwise as soon as they are whole. Closing the iterator gives up
what is outstanding."""


@dataclass(frozen=True)
class Rollouts:
    """Stage 2 as it is built: `close` ends the processes of tools and environments."""

    start: StartRollouts
    close: Callable[[], None] = lambda: None


class RewardFunction(Protocol):
    """A reward: a number for one rollout, or None to abstain. May be a coroutine.

    One whose second argument is called `rollouts` is given the whole group and returns a list.
    """

    def __call__(self, prompt: Prompt, rollout: Any, /) -> Any: ...


class RewardStage(Protocol):
    """Stage 3. Scores each group as it arrives, while others are still being generated."""

    def score_each(self, groups: AsyncIterator[Group], after: Sequence[Group] = ()) -> AsyncIterator[Group]:
        """`after`: groups of the same step that were scored before; they count in its share of failed rewards."""
        ...

    def close(self) -> None:
        """Ends what it started; called when the run ends, however it does."""
        ...


AdvantageFunction = Callable[[Sequence[float]], Sequence[float]]
"""Stage 4, inside: rewards of one group in, advantages out."""

PolicyLossFunction = Callable[["torch.Tensor", "torch.Tensor", Batch], PolicyLoss]
"""Stage 6, inside: policy and old logprobs `[T]` and their batch in, the policy term of each token out."""


class Loss(Protocol):
    """Stage 6. The whole objective: a policy loss with its correction, KL term and average."""

    @property
    def takes_snapshot(self) -> bool:
        """Whether several updates need the policy's logprobs from before the first."""
        ...

    def prepare(self, batches: Sequence[Batch], sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> list[Batch]:
        """Called once a step, before the first update; `batches` are one rank's."""
        ...

    def __call__(self, policy_logprobs: torch.Tensor, batch: Batch) -> LossOutput:
        """Policy logprobs `[T]` and their batch in, this batch's share of the step's loss out."""
        ...


class SavedTrainer(Protocol):
    """What a checkpoint needs of a trainer."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """Weights, optimizer and random state: all that an exact continuation needs."""
        ...

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def save_model(self, folder: str) -> None:
        """Writes what a user takes away: an adapter folder or a model folder."""
        ...


class Trainer(SavedTrainer, Protocol):
    """Stage 7. Owns the policy and its optimizer; the loss is handed to it."""

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        """One optimizer step over all batches; with none, or a gradient that is not finite, none is made."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of `token_ids[1:]` at temperature 1, through the weights that it trains."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What an engine must take over: the adapter under LoRA, else every parameter."""
        ...

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The weights of a state, for a run that starts from another's."""
        ...


class Sync(Protocol):
    """Stage 8. Carries the trainer's weights to the engine and proves that they arrived."""

    async def push(self, version: int) -> None:
        """Nothing happens if the engine holds `version` already."""
        ...

    def close(self) -> None:
        """Removes what it left on the way; called when the run ends, however it does."""
        ...


class Checkpoint(Protocol):
    """Stage 9. The one atomic commit."""

    async def restore_or_start(self) -> RunState: ...

    async def commit_if_due(self, state: RunState) -> None: ...

    async def commit(self, state: RunState) -> None: ...

    async def commit_last(self) -> RunState:
        """Commits the end of the last window; nothing was trained since."""
        ...

    async def finish(self, state: RunState) -> None:
        """Commits a last time and writes the trained model."""
        ...


class ReportStage(Protocol):
    """Stage 10. Tells every report what happened."""

    async def start(self, state: RunState) -> None: ...

    async def write(
        self,
        state: RunState,
        step: StepGroups,
        result: UpdateResult,
        seconds: Mapping[str, float],
    ) -> None: ...


class Report(Protocol):
    """One place where people look: the console, a file, a page."""

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        """`card` describes the run; `history` holds the lines of the steps already done, after a resume."""
        ...

    def write(self, report: StepReport) -> None: ...

    def evaluated(self, report: EvalReport) -> None: ...

    def finish(self, summary: Mapping[str, Any]) -> None: ...

    def fail(self) -> None:
        """The run broke; the error itself is reported elsewhere."""
        ...


class Evaluation(Protocol):
    """Not part of the pipeline: held-out prompts through the same engine."""

    async def run_if_due(self, state: RunState, since: int) -> None:
        """`since` is the step of the last call."""
        ...


@dataclass(frozen=True)
class Stages:
    """What a runtime hands to the loop."""

    data: Data
    rollout: StartRollouts
    reward: RewardStage
    assign_advantages: Callable[[Sequence[Group]], list[Group]]
    filter: Callable[[Sequence[Group]], list[Group]]
    pack: Callable[[Sequence[Group]], list[Batch]]
    train: Callable[[Sequence[Batch]], Awaitable[UpdateResult]]
    """`step` of a trainer."""
    sync: Sync
    checkpoint: Checkpoint
    report: ReportStage
    evaluation: Evaluation
    observer: Observer = field(default_factory=Observer)
