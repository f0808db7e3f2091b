"""Two of the checks that are always on: trained ids are sampled ids, and the loss does not depend on the split."""

from dataclasses import replace

import torch

from podium.errors import SplitError, TokenMismatchError
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


def check_split(loss: Loss, policy_logprobs: torch.Tensor, batch: Batch) -> None:
    """The loss and its gradient on a batch equal the sum over its two halves.

    Advantages are set to 1 for the check: real ones average to 0, where a wrong denominator would not show.
    """
    batch = replace(batch, advantages=batch.loss_mask)
    half = batch.num_documents // 2
    cut = int(batch.cu_seqlens[half])
    logprobs = policy_logprobs.detach().clone().requires_grad_()
    with torch.enable_grad():
        whole = loss(logprobs, batch).loss
        parts = loss(logprobs[:cut], batch.documents(0, half)).loss
        parts = parts + loss(logprobs[cut:], batch.documents(half, batch.num_documents)).loss
        of_whole, of_parts = (torch.autograd.grad(value, logprobs)[0] for value in (whole, parts))
    whole, parts = float(whole.detach()), float(parts.detach())
    scale, gap = max(1.0, abs(whole)), abs(whole - parts)
    gradient_gap = float((of_whole - of_parts).abs().sum()) / max(1e-12, float(of_whole.abs().sum()))
    if not (gap <= SPLIT_TOLERANCE * scale and gradient_gap <= SPLIT_TOLERANCE):
        raise SplitError(
            f"the loss of {batch.num_documents} documents is {whole:.6f} in one batch and {parts:.6f} in "
            f"two (gradients differ by {gradient_gap:.1%}); divide by batch.num_loss_tokens or batch.num_rollouts, "
            "which count the whole step, and not by what the batch at hand holds"
        )
