"""The trainer's checks: trained ids are sampled ids, the loss does not depend on the split, nor on shared prompts."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from podium.errors import SharedPrefixError, SplitError, TokenMismatchError
from podium.model.self_check import TOLERANCE
from podium.records import Batch, ids_digest
from podium.stages import Loss

SPLIT_TOLERANCE = 1e-4


def check_ids(batch: Batch) -> None:
    """Each document's answer has the fingerprint that the engine gave it."""
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

    Advantages are set to 1 for the check: real ones average to 0, where a wrong denominator would not show.
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

    What is not finite is none of its business: such a step is skipped and counted.
    """
    whole, parts, distance = gap.tolist()
    if not all(map(math.isfinite, (whole, parts, distance))):
        return
    if not (abs(whole - parts) <= SPLIT_TOLERANCE * max(1.0, abs(whole)) and distance <= SPLIT_TOLERANCE):
        raise SplitError(
            f"the loss of a batch is {whole:.6f} in one piece and {parts:.6f} in two (gradients differ by "
            f"{distance:.1%}); divide by batch.num_loss_tokens or batch.num_rollouts, which count the whole step, and "
            "not by what the batch at hand holds"
        )


def check_shared_prefix(logprobs_of: Callable[[Batch, bool], torch.Tensor], batch: Batch, dtype: torch.dtype) -> bool:
    """Whether the batch has two answers of one prompt; if so, their logprobs with the prompt computed once, and twice.

    Raises `SharedPrefixError` if they differ by more than rounding does.
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
