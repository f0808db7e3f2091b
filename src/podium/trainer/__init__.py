"""What all trainers share: metrics and checks of a step, sums over ranks, the optimizer, and the reference policy.

Metrics are sums over loss tokens divided by the step's totals, so they do not depend on how the step was split. The
checks: trained ids are the sampled ids, and the loss depends neither on the split nor on shared prompts.

The optimizer is AdamW with 32-bit or 8-bit state; that state is plain tensors (no pickle). The 8-bit optimizer is
bitsandbytes' (arXiv 2110.02861): each moment is one byte per parameter plus a float32 scale per 256 parameters. Tensors
of fewer than 4096 elements keep float32 moments. The update is computed in float32 either way.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from podium.errors import (
    CheckpointError,
    InputError,
    RankError,
    SharedPrefixError,
    SplitError,
    TokenMismatchError,
    first_line,
)
from podium.model.forward import PlacedBatch, place
from podium.model.self_check import TOLERANCE
from podium.records import Batch, LossOutput, ids_digest
from podium.stages import Loss

T = TypeVar("T")


def halved(batch: Batch, times: int) -> list[Batch]:
    """The batch in at most 2^times parts, without splitting documents."""
    if times == 0 or batch.num_documents == 1:
        return [batch]
    middle = batch.num_documents // 2
    halves = (batch.documents(0, middle), batch.documents(middle, batch.num_documents))
    return [part for half in halves for part in halved(half, times - 1)]


def metric_shares(
    output: LossOutput, logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch
) -> dict[str, torch.Tensor]:
    """This batch's share of each metric of the update."""
    mask = batch.loss_mask.bool()

    def share(values: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, values, 0).double().sum() / batch.num_loss_tokens

    before = logprobs if batch.old_logprobs is None else batch.old_logprobs
    gap = before - batch.rollout_logprobs  # before the first update, so the policy has not moved yet
    ratio = gap.exp()
    shares = {
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
    }
    if (drift := output.drift) is not None:  # three estimates of the distance, whichever the loss uses
        shares |= {"kl/k1": share(drift), "kl/k2": share(drift**2 / 2), "kl/k3": share(torch.expm1(-drift) + drift)}
    return shares


def metrics_over_ranks(totals: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The metrics of an update, from each rank's shares."""
    summed = sum_over_ranks(torch.stack(list(totals.values())))
    metrics = dict(zip(totals, summed.tolist(), strict=True))
    variance = metrics.pop("ratio_squared") - metrics["loss/ratio_mean"] ** 2
    return metrics | {"loss/ratio_var": max(0.0, variance)}


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


@torch.no_grad()
def check_shared_prefix(
    logprobs_of: Callable[[PlacedBatch], torch.Tensor], pair: Batch, device: torch.device, dtype: torch.dtype
) -> None:
    """Compares logprobs of two answers to one prompt, with the prompt computed once and twice.

    Raises `SharedPrefixError` if they differ by more than rounding.
    """
    once, twice = (logprobs_of(place(pair, device, shared_prefix=is_shared)) for is_shared in (True, False))
    gap = float((once - twice).abs().max())
    if not gap <= TOLERANCE[dtype]:
        raise SharedPrefixError(
            f"pack.shared_prefix: logprobs differ by {gap:.3g} from those of the plain path with this model; set "
            "pack.shared_prefix = false"
        )


def together(function: Callable[[], T], device: torch.device) -> T:
    """Calls the function on every rank and returns its result; an error on one rank stops all.

    All ranks must make the same calls in the same order. So a rank reports its error to the others, which stop with a
    `RankError`. When a process dies, gloo raises a RuntimeError at once; with NCCL, or if a process hangs, the others
    wait until torchrun kills them or the timeout of `init_process_group` has passed.
    """
    try:
        result = function()
    except Exception:
        on_any_rank(True, device)
        raise
    if on_any_rank(False, device):
        raise RankError(
            "another rank failed in this step, so this rank cannot continue; the other rank's message says why"
        )
    return result


def has_several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def on_any_rank(is_so: bool, device: torch.device) -> bool:
    return bool(sum_over_ranks(torch.tensor(float(is_so), device=device))) if has_several_ranks() else is_so


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


Parameters = Mapping[str, torch.nn.Parameter]
PartFor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A parameter and a whole tensor of its shape in, the part that this rank keeps out."""
OptimizerName = Literal["adamw", "adamw_8bit"]

BLOCK, MIN_8BIT_SIZE = 256, 4096
"""bitsandbytes' own limits: elements that share a scale; smaller tensors keep float32 moments."""
REMEDY = 'set trainer.optimizer = "adamw"'


def make_optimizer(
    parameters: Parameters, name: OptimizerName, *, lr: float, betas: tuple[float, float], weight_decay: float
) -> torch.optim.Optimizer:
    """One parameter group, in the order of the names."""
    if name == "adamw":
        return torch.optim.AdamW(parameters.values(), lr=lr, betas=betas, weight_decay=weight_decay, fused=True)
    if all(parameter.numel() < MIN_8BIT_SIZE for parameter in parameters.values()):
        raise InputError(
            f"trainer.optimizer = {name!r} has no effect: every trained tensor has fewer than {MIN_8BIT_SIZE} elements "
            f"and keeps a 32-bit state; {REMEDY}"
        )
    from bitsandbytes.optim.adamw import AdamW8bit  # type: ignore[import-not-found]  # an extra

    options = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "min_8bit_size": MIN_8BIT_SIZE}
    return AdamW8bit(parameters.values(), **options)


def check_optimizer(name: OptimizerName, device: torch.device) -> None:
    """Raises `InputError` unless the optimizer can make a step on this device; tries one on a few numbers."""
    if name != "adamw_8bit":
        return
    probe = torch.nn.Parameter(torch.ones(MIN_8BIT_SIZE, device=device))
    probe.grad = torch.ones_like(probe)
    try:
        make_optimizer({"probe": probe}, name, lr=0.1, betas=(0.9, 0.999), weight_decay=0.0).step()
    except ImportError:
        raise InputError(
            f"trainer.optimizer = {name!r} needs a package: pip install 'bitsandbytes>=0.50'; or {REMEDY}"
        ) from None
    except Exception as error:  # a build for another machine raises anything
        raise InputError(
            f"trainer.optimizer = {name!r}: this bitsandbytes cannot run on {device}: {first_line(error)}; try a newer "
            f"one, or {REMEDY}"
        ) from None


def state_bytes(name: OptimizerName, parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of the two moments of all parameters."""
    return sum(
        2 * (p.numel() + 4 * -(-p.numel() // BLOCK))
        if name == "adamw_8bit" and p.numel() >= MIN_8BIT_SIZE
        else 2 * p.numel() * p.element_size()
        for p in parameters
    )


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Iterator[tuple[str, torch.Tensor]]:
    """`optimizer.<parameter>.<slot>` → tensor; a count that the optimizer keeps as an int becomes an int64 tensor."""
    for name, parameter in parameters.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            yield f"optimizer.{name}.{slot}", torch.as_tensor(value)


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Parameters,
    tensors: Mapping[str, torch.Tensor],
    part_for: PartFor,
) -> None:
    """The inverse of `optimizer_state`; a parameter without saved slots has not been updated yet."""
    first_moment = "exp_avg" if isinstance(optimizer, torch.optim.AdamW) else "state1"
    for name, parameter in parameters.items():
        prefix = f"optimizer.{name}."
        slots = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if slots and first_moment not in slots:
            raise CheckpointError("the checkpoint holds another optimizer's state; set trainer.optimizer as it was")
        optimizer.state.pop(parameter, None)  # this optimizer may have stepped when the saved one had not
        if slots:
            optimizer.state[parameter] = {
                slot: int(value)
                if value.dtype == torch.int64
                else part_for(parameter, value.clone())
                if value.shape == parameter.shape
                else value.clone().to(parameter.device)
                for slot, value in sorted(slots.items())  # the same order on every rank
            }


Schedule = Literal["constant", "linear", "cosine"]


def rate_at(lr: float, step: int, *, warmup_steps: int, total_steps: int, schedule: Schedule) -> float:
    """Learning rate of a step, counted from 0: a linear warm-up, then constant, or a linear or cosine decay to zero at
    the run's last step."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    left = max(0.0, 1 - done)
    return lr * (left if schedule == "linear" else (1 + math.cos(math.pi * (1 - left))) / 2)


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
        parameters: Parameters,
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
    def load_state(self, tensors: Mapping[str, torch.Tensor], part_for: PartFor) -> None:
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
