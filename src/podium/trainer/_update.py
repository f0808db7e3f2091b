"""One optimizer step's gradient and metrics, batch by batch and over all ranks, the checks, and the reference policy.

Metrics are sums over loss tokens divided by the step's totals, so they do not depend on how the step was split. The
checks: trained ids are the sampled ids, and the loss depends neither on the split nor on shared prompts.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from podium.errors import RankError, SharedPrefixError, SplitError, TokenMismatchError, TooLargeError
from podium.model.forward import PlacedBatch
from podium.model.self_check import TOLERANCE
from podium.records import Batch, LossOutput, ids_digest
from podium.stages import Loss

T = TypeVar("T")
LogprobsOf = Callable[[PlacedBatch], tuple[torch.Tensor, torch.Tensor]]
"""A batch in, the policy's logprobs and entropies `[T]` out."""
NOT_AGAIN = (
    "a batch does not fit into memory, and a trainer that shards weights or gradients over ranks cannot repeat a pass: "
    "lower pack.max_tokens_per_batch or set trainer.gradient_checkpointing = true"
)


def gradients_of_update(
    logprobs_of: LogprobsOf,
    place: Callable[[Batch], PlacedBatch],
    parameters: Collection[torch.nn.Parameter],
    batches: Sequence[PlacedBatch],
    loss: Loss,
    halvings: int,
    backward: Callable[[torch.Tensor, bool], None],
    sum_gradients: Callable[[], None],
    *,
    can_cut: bool = True,
) -> tuple[dict[str, float], int]:
    """(metrics, halvings): computes the update's gradient, with every batch halved `halvings` times.

    If any rank runs out of memory, all ranks halve all batches once more and repeat the update from a clean gradient.
    The gradient is the same, because shares add up. A single document that does not fit is an error; without `can_cut`
    any batch that does not fit is. `backward(loss, is_last)` is called per batch, `sum_gradients()` after all of them.
    `parameters` are the optimizer's own; a model with sharded weights may hold others at this moment.
    """
    while True:
        parts = batches
        if halvings:
            parts = [place(part) for placed in batches for part in halved(placed.batch.to("cpu"), halvings)]
        for parameter in parameters:
            parameter.grad = None
        totals = _attempt(logprobs_of, parts, loss, backward, can_cut=can_cut)
        if totals is not None:
            sum_gradients()
            return _metrics(totals), halvings
        halvings += 1
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _attempt(
    logprobs_of: LogprobsOf,
    parts: Sequence[PlacedBatch],
    loss: Loss,
    backward: Callable[[torch.Tensor, bool], None],
    *,
    can_cut: bool,
) -> dict[str, torch.Tensor] | None:
    """The sums of this rank's batches, or None if a batch of any rank does not fit. One rank's error stops all.

    Without `can_cut` the passes themselves communicate, and an error is raised directly (see `together`).
    """
    totals, device = None, parts[0].row.token_ids.device
    try:
        totals = accumulate_gradients(logprobs_of, parts, loss, backward)
    except Exception as error:
        is_too_large = isinstance(error, torch.OutOfMemoryError)
        if not can_cut:
            if is_too_large:
                raise TooLargeError(NOT_AGAIN) from error
            raise
        if not is_too_large or all(part.batch.num_documents == 1 for part in parts):
            worst_over_ranks(Outcome.FAILED, device)
            raise
    # Outside the handler: the exception holds on to the failed pass's memory.
    worst = worst_over_ranks(Outcome.TOO_LARGE if totals is None else Outcome.DONE, device)
    if worst is Outcome.FAILED:
        raise RankError(ANOTHER_FAILED)
    return totals if worst is Outcome.DONE else None


def halved(batch: Batch, times: int) -> list[Batch]:
    """The batch in at most 2^times parts, without splitting documents."""
    if times == 0 or batch.num_documents == 1:
        return [batch]
    middle = batch.num_documents // 2
    halves = (batch.documents(0, middle), batch.documents(middle, batch.num_documents))
    return [part for half in halves for part in halved(half, times - 1)]


def accumulate_gradients(
    logprobs_of: LogprobsOf,
    batches: Sequence[PlacedBatch],
    loss: Loss,
    backward: Callable[[torch.Tensor, bool], None],
) -> dict[str, torch.Tensor]:
    """Accumulates these batches' gradient on the parameters and returns their share of each metric.

    Synchronises with the device only at the end, for the check of the split.
    """
    totals: dict[str, torch.Tensor] = {}
    gap: torch.Tensor | None = None
    for placed in batches:
        logprobs, entropy = logprobs_of(placed)
        if gap is None and placed.batch.num_documents > 1:
            gap = split_gap(loss, logprobs, placed.batch)
        output = loss(logprobs, placed.batch)
        backward(output.loss, placed is batches[-1])
        for name, value in _sums(output, logprobs.detach(), entropy, placed.batch).items():
            totals[name] = totals[name] + value if name in totals else value
    if gap is not None:
        refuse_split_gap(gap)
    return totals


def logprobs_by_rollout(passes: Sequence[tuple[Batch, torch.Tensor]]) -> dict[tuple[int, str], list[float]]:
    """From batches and their logprobs `[T]` to the logprobs of each rollout's own tokens, by ordinal and digest.

    One transfer for all. The first pass over a rollout counts.
    """
    if not passes:
        return {}
    flat = torch.cat([logprobs for _, logprobs in passes]).tolist()
    found: dict[tuple[int, str], list[float]] = {}
    offset = 0
    for batch, logprobs in passes:
        starts = batch.cu_seqlens.tolist()
        for number, key in enumerate(zip(batch.ordinals, batch.digests, strict=True)):
            first = starts[number] + batch.answer_starts[number]
            found.setdefault(key, flat[offset + first : offset + starts[number + 1]])
        offset += len(logprobs)
    return found


def _metrics(totals: dict[str, torch.Tensor]) -> dict[str, float]:
    """The metrics of the step, over all ranks."""
    summed = sum_over_ranks(torch.stack(list(totals.values())))
    metrics = dict(zip(totals, summed.tolist(), strict=True))
    variance = metrics.pop("ratio_squared") - metrics["loss/ratio_mean"] ** 2
    return metrics | {"loss/ratio_var": max(0.0, variance)}


def _sums(output: LossOutput, logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    """This batch's share of each metric of the step."""
    mask = batch.loss_mask.bool()

    def share(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, 0).double().sum() / batch.num_loss_tokens

    before = logprobs if batch.old_logprobs is None else batch.old_logprobs
    gap = before - batch.rollout_logprobs  # before the first update, so the policy has not moved yet
    ratio = gap.exp()
    return {
        "loss/total": output.loss.detach().double(),
        "loss/policy": output.policy_loss.double(),
        "loss/kl": output.kl_loss.double(),
        "loss/ratio_mean": share(output.ratio),
        "ratio_squared": share(output.ratio.double() ** 2),
        "loss/clipped_low_share": share(output.clipped_low),
        "loss/clipped_high_share": share(output.clipped_high),
        "policy/entropy": share(entropy),
        "mismatch/abs_mean": share(gap.abs()),
        "mismatch/k1": share(-gap),
        "mismatch/k3": share(gap.expm1() - gap),
        "mismatch/outside_share": share((ratio < 0.9) | (ratio > 1.1)),
        "mismatch/weight_mean": share(output.weights),
        "mismatch/masked_share": share(output.weights == 0),
        **_distance(output.drift, share),
    }


def _distance(drift: torch.Tensor | None, share: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Three estimates of the policy's distance to the reference, independent of the one that the loss uses."""
    if drift is None:
        return {}
    return {
        "kl/k1": share(drift),
        "kl/k2": share(drift**2 / 2),
        "kl/k3": share(torch.expm1(-drift) + drift),
    }


SPLIT_TOLERANCE = 1e-4


def check_ids(batch: Batch) -> None:
    """Raises `TokenMismatchError` unless each document's answer has the digest that the engine gave it."""
    ids, starts = batch.token_ids.tolist(), batch.cu_seqlens.tolist()
    for number, (prompt_length, digest) in enumerate(zip(batch.answer_starts, batch.digests, strict=True)):
        answer = ids[starts[number] + prompt_length : starts[number + 1]]
        if ids_digest(answer) != digest:
            raise TokenMismatchError(
                f"document {number} of a batch would train ids {answer[:12]} … that are not the ones sampled; "
                "somewhere between engine and trainer an answer was decoded and encoded again, or cut"
            )


def split_gap(loss: Loss, policy_logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """`[3]`: the loss of a batch, the sum over its two halves, and the relative distance of the two gradients.

    Advantages are 1 for this check: real advantages average to 0, where a wrong denominator would not show.
    """
    batch = replace(batch, advantages=batch.loss_mask.clone())
    half = batch.num_documents // 2
    cut = int(batch.cu_seqlens[half])
    logprobs = policy_logprobs.detach().clone().requires_grad_()
    with torch.enable_grad():
        whole = loss(logprobs, batch).loss
        parts = loss(logprobs[:cut], batch.documents(0, half)).loss
        parts = parts + loss(logprobs[cut:], batch.documents(half, batch.num_documents)).loss
        of_whole, of_parts = (torch.autograd.grad(value, logprobs)[0] for value in (whole, parts))
    distance = (of_whole - of_parts).abs().sum() / of_whole.abs().sum().clamp(min=1e-12)
    return torch.stack([whole.detach(), parts.detach(), distance])


def refuse_split_gap(gap: torch.Tensor) -> None:
    """Raises `SplitError` unless loss and gradient of the parts add up to those of the whole.

    Ignores values that are not finite: such a step is skipped and counted elsewhere.
    """
    whole, parts, distance = gap.tolist()
    if not all(map(math.isfinite, (whole, parts, distance))):
        return
    if not (abs(whole - parts) <= SPLIT_TOLERANCE * max(1.0, abs(whole)) and distance <= SPLIT_TOLERANCE):
        raise SplitError(
            f"the loss of a batch is {whole:.6f} in one piece and {parts:.6f} in two (gradients differ by "
            f"{distance:.1%}); divide by batch.num_loss_tokens or batch.num_rollouts, which count the whole step, and "
            "not by counts of the current batch"
        )


def check_shared_prefix(logprobs_of: Callable[[Batch, bool], torch.Tensor], batch: Batch, dtype: torch.dtype) -> bool:
    """Compares logprobs of two answers to one prompt, with the prompt computed once and twice.

    Raises `SharedPrefixError` if they differ by more than rounding. Returns whether the batch has two such answers.
    """
    siblings = (n for n in range(1, batch.num_documents) if batch.ordinals[n] == batch.ordinals[n - 1])
    second = next(siblings, None)
    if second is None:
        return False
    pair = batch.documents(second - 1, second + 1)
    gap = float((logprobs_of(pair, True) - logprobs_of(pair, False)).abs().max())
    if not gap <= TOLERANCE[dtype]:
        raise SharedPrefixError(
            f"pack.shared_prefix: logprobs differ by {gap:.3g} from those of the plain path with this model; set "
            "pack.shared_prefix = false"
        )
    return True


ANOTHER_FAILED = "another rank failed in this step, so this rank cannot continue; the other rank's message says why"


class Outcome(IntEnum):
    """How a rank's pass over its batches ended. The worst outcome of any rank counts for all.

    All ranks must make the same calls in the same order. So a rank reports an error inside a pass to the others, which
    stop with a `RankError`. When a process dies, gloo raises a RuntimeError at once; with NCCL, or if a process hangs,
    the others wait until torchrun kills them or the timeout of `init_process_group` has passed.
    """

    DONE = 0
    TOO_LARGE = 1
    """Out of memory; smaller batches may fit."""
    FAILED = 2


def has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def worst_over_ranks(outcome: Outcome, device: torch.device) -> Outcome:
    if not has_several_ranks():
        return outcome
    worst = torch.tensor(int(outcome), device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return Outcome(int(worst))


def together(function: Callable[[], T], device: torch.device, *, asks_others: bool = False) -> T:
    """Calls the function on every rank and returns its result; an error on one rank stops all.

    `asks_others`: the function itself communicates (it gathers weights or reduces gradients), so the other ranks wait
    inside it and would mistake a report for their answer. An error is then raised directly and ends the process.
    """
    if asks_others:
        return function()
    try:
        result = function()
    except Exception:
        worst_over_ranks(Outcome.FAILED, device)
        raise
    if worst_over_ranks(Outcome.DONE, device) is Outcome.FAILED:
        raise RankError(ANOTHER_FAILED)
    return result


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The elementwise sum over all ranks."""
    if not has_several_ranks():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def sum_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sums in float32 or wider. A rank without a gradient counts as zeros; if no rank has one, there is still none."""
    if not has_several_ranks():
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    present = torch.tensor([float(parameter.grad is not None) for parameter in trained], device=trained[0].device)
    for parameter, count in zip(trained, sum_over_ranks(present).tolist(), strict=True):
        if count:
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total = own.to(torch.promote_types(own.dtype, torch.float32)).contiguous()
            dist.all_reduce(total)
            parameter.grad = total.to(own.dtype)


class ReferencePolicy:
    """The reference policy of a KL term.

    With LoRA it is the policy with its adapter disabled, without any copy. Otherwise, or if the reference follows the
    policy, it is a copy of the trained parameters, swapped in for a forward pass. Following means
    ref = (1 − alpha)·ref + alpha·policy every `every` steps.

    `logprobs_of` computes the policy's logprobs; `peft` is its PEFT model, or None for full weights.
    """

    def __init__(
        self,
        logprobs_of: Callable[[PlacedBatch], torch.Tensor],
        peft: Any,
        parameters: Mapping[str, torch.nn.Parameter],
        alpha: float = 0.0,
        every: int = 1,
    ) -> None:
        self._logprobs_of, self._peft, self._parameters = logprobs_of, peft, parameters
        self._alpha, self._every = alpha, every
        needs_copy = peft is None or alpha > 0
        self._copy = {name: p.detach().clone() for name, p in parameters.items()} if needs_copy else {}

    @torch.no_grad()
    def logprobs(self, placed: PlacedBatch) -> torch.Tensor:
        """`[T]` at the batch's temperature."""
        with self._in_place():
            return self._logprobs_of(placed)

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Moves the reference towards the policy, after a step, counted from 1."""
        if self._alpha and step % self._every == 0:
            for name, tensor in self._copy.items():
                tensor.lerp_(self._parameters[name].detach(), self._alpha)

    def state(self) -> dict[str, torch.Tensor]:
        """Empty if the reference can be rebuilt from the model alone."""
        return {f"reference.{name}": tensor for name, tensor in self._copy.items()} if self._alpha else {}

    @torch.no_grad()
    def load_state(
        self,
        tensors: Mapping[str, torch.Tensor],
        part_for: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        if self._alpha:
            for name, tensor in self._copy.items():
                tensor.copy_(part_for(tensor, tensors[f"reference.{name}"]))

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        if not self._copy:
            with self._peft.disable_adapter():
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):  # a sharded parameter keeps its memory, so values are exchanged
                mine, other = parameter.to_local(), self._copy[name].to_local()  # type: ignore[attr-defined]
                kept = mine.clone()
                mine.copy_(other)
                other.copy_(kept)
            else:
                parameter.data, self._copy[name] = self._copy[name], parameter.data
