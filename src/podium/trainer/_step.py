"""One optimizer step's gradient and statistics, batch by batch and over all ranks.

The statistics are sums over loss tokens, divided at the end by the step's totals; so they do not depend on how the
step was split either.
"""

from collections.abc import Callable, Collection, Sequence

import torch

from podium.errors import RankError, TooLargeError
from podium.model.forward import Placed
from podium.records import Batch, LossOutput
from podium.stages import Loss
from podium.trainer._checks import refuse_split_gap, split_gap
from podium.trainer._ranks import ANOTHER_FAILED, Outcome, sum_over_ranks, worst_over_ranks

LogprobsOf = Callable[[Placed], tuple[torch.Tensor, torch.Tensor]]
"""A batch in, the policy's logprobs and entropies `[T]` out."""
NOT_AGAIN = (
    "a batch does not fit into memory, and a trainer that spreads weights or gradients over ranks cannot begin a pass "
    "again: lower pack.max_tokens_per_batch or set trainer.gradient_checkpointing = true"
)


def gradients_of_update(
    logprobs_of: LogprobsOf,
    place: Callable[[Batch], Placed],
    parameters: Collection[torch.nn.Parameter],
    batches: Sequence[Placed],
    loss: Loss,
    halvings: int,
    backward: Callable[[torch.Tensor, bool], None],
    sum_gradients: Callable[[], None],
    *,
    can_cut: bool = True,
) -> tuple[dict[str, float], int]:
    """(metrics, halvings): the update's gradient, with every batch cut in two `halvings` times.

    Out of memory on any rank, all batches of all ranks are cut once more and the whole update is done again from a
    clean gradient: it is the same gradient, since shares add up. A single document that does not fit is more than can
    be helped; without `can_cut` so is any batch. `backward(loss, is_last)` is called for each batch, `sum_gradients()`
    after them all. `parameters` are the optimizer's own, which a model with spread weights need not have in place now.
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
    parts: Sequence[Placed],
    loss: Loss,
    backward: Callable[[torch.Tensor, bool], None],
    *,
    can_cut: bool,
) -> dict[str, torch.Tensor] | None:
    """The sums of this rank's batches, or None if these or another rank's do not fit. One rank's error stops all.

    Without `can_cut` the passes themselves ask the other ranks, and an error is raised as it is (`together`).
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
    """The batch in at most 2^times parts of whole documents."""
    if times == 0 or batch.num_documents == 1:
        return [batch]
    middle = batch.num_documents // 2
    halves = (batch.documents(0, middle), batch.documents(middle, batch.num_documents))
    return [part for half in halves for part in halved(half, times - 1)]


def accumulate_gradients(
    logprobs_of: LogprobsOf,
    batches: Sequence[Placed],
    loss: Loss,
    backward: Callable[[torch.Tensor, bool], None],
) -> dict[str, torch.Tensor]:
    """Leaves these batches' gradient on the parameters and returns their share of each metric.

    Waits for the device only at the end, with the check of the split.
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
    """Batches and their logprobs `[T]` in; those of each rollout's own tokens out, by ordinal and digest.

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
    """Of the step, over all ranks."""
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
    """Three estimates of the policy's distance from the reference, whichever of them the loss uses."""
    if drift is None:
        return {}
    return {
        "kl/k1": share(drift),
        "kl/k2": share(drift**2 / 2),
        "kl/k3": share(torch.expm1(-drift) + drift),
    }
