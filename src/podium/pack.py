"""Stage 5: groups to batches of at most `max_tokens_per_batch` tokens.

A document is a prompt and one answer. Documents are placed longest first into the fullest batch that still has room
(best fit); one that is longer than the limit becomes a batch of its own. Nothing is dropped but rollouts without a
reward or without a loss token. After packing every tensor is flat over tokens, `[T]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from podium.records import Batch, Group, Prompt, Rollout


@dataclass(frozen=True)
class Document:
    """A prompt and one answer, on the way into a batch."""

    prompt: Prompt
    rollout: Rollout
    advantage: float

    def __len__(self) -> int:
        return len(self.prompt.token_ids) + len(self.rollout.token_ids)


def pack(
    groups: Sequence[Group],
    *,
    max_tokens_per_batch: int,
    temperature: float,
    minibatches: int = 1,
    device: str | torch.device = "cpu",
) -> list[Batch]:
    """The batches of a step, update by update; each knows its update's totals, so that averages are over all of it.

    A group is never divided between two updates; with fewer groups than `minibatches` there are fewer updates.
    """
    batches: list[Batch] = []
    for number in range(minibatches):
        documents = [
            Document(group.prompt, rollout, advantage)
            for group in groups[number::minibatches]
            for rollout, reward, advantage in zip(group.rollouts, group.rewards, group.advantages, strict=True)
            if reward is not None and any(rollout.loss_mask)
        ]
        num_loss_tokens = sum(sum(document.rollout.loss_mask) for document in documents)
        batches += [
            to_batch(
                [documents[index] for index in bin_],
                num_loss_tokens=num_loss_tokens,
                num_rollouts=len(documents),
                temperature=temperature,
                minibatch=number,
                device=device,
            )
            for bin_ in best_fit([len(document) for document in documents], max_tokens_per_batch)
        ]
    return batches


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Indices by bin, best fit decreasing; ties keep their order."""
    bins: list[list[int]] = []
    left: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [b for b, space in enumerate(left) if space >= lengths[index]]
        if fitting:
            best = min(fitting, key=lambda b: left[b])
            bins[best].append(index)
            left[best] -= lengths[index]
        else:
            bins.append([index])
            left.append(room - lengths[index])
    return [sorted(bin_) for bin_ in bins]


def to_batch(
    documents: Sequence[Document],
    *,
    num_loss_tokens: int,
    num_rollouts: int,
    temperature: float,
    minibatch: int = 0,
    device: str | torch.device = "cpu",
) -> Batch:
    """Packs the documents into one row, in their order."""
    ids: list[int] = []
    positions: list[int] = []
    owners: list[int] = []
    mask: list[float] = []
    advantages: list[float] = []
    logprobs: list[float] = []
    starts = [0]
    for number, document in enumerate(documents):
        prompt, rollout = document.prompt.token_ids, document.rollout
        blank = [0.0] * len(prompt)
        ids += [*prompt, *rollout.token_ids]
        positions += range(len(document))
        owners += [number] * len(document)
        mask += [*blank, *map(float, rollout.loss_mask)]
        advantages += [*blank, *(document.advantage * kept for kept in rollout.loss_mask)]
        logprobs += [*blank, *(lp * kept for lp, kept in zip(rollout.rollout_logprobs, rollout.loss_mask, strict=True))]
        starts.append(len(ids))
    return Batch(
        token_ids=torch.tensor(ids, device=device),
        position_ids=torch.tensor(positions, device=device),
        document_ids=torch.tensor(owners, device=device),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        loss_mask=torch.tensor(mask, device=device),
        advantages=torch.tensor(advantages, device=device),
        rollout_logprobs=torch.tensor(logprobs, device=device),
        temperature=temperature,
        num_loss_tokens=num_loss_tokens,
        num_rollouts=num_rollouts,
        minibatch=minibatch,
        answer_starts=tuple(len(document.prompt.token_ids) for document in documents),
        digests=tuple(document.rollout.digest for document in documents),
    )
