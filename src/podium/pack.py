"""Stage 5: groups to batches of at most `max_tokens_per_batch` tokens.

A document is a prompt and one answer. Documents are placed longest first into the fullest batch that still has room
(best fit); one that is longer than the limit becomes a batch of its own. Nothing is dropped but rollouts without a
reward or without a loss token. After packing every tensor is flat over tokens, `[T]`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
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
    shared_prefix: bool = False,
) -> list[Batch]:
    """The batches of a step, update by update; each knows its update's totals, so that averages are over all of it.

    A group is never divided between two updates; with fewer groups than `minibatches` there are fewer updates.
    `shared_prefix`: a prompt counts once for all its answers in a batch, which therefore stay together.
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
        units = families(documents, max_tokens_per_batch) if shared_prefix else [[document] for document in documents]
        batches += [
            to_batch(
                [document for index in bin_ for document in units[index]],
                num_loss_tokens=num_loss_tokens,
                num_rollouts=len(documents),
                temperature=temperature,
                minibatch=number,
            )
            for bin_ in best_fit([family_tokens(unit) for unit in units], max_tokens_per_batch)
        ]
    return batches


def families(documents: Sequence[Document], room: int) -> list[list[Document]]:
    """Documents of one prompt together, as many as there is room for with the prompt counted once."""
    made: list[list[Document]] = []
    for document in documents:
        is_sibling = bool(made) and made[-1][0].prompt.ordinal == document.prompt.ordinal
        if is_sibling and family_tokens([*made[-1], document]) <= room:
            made[-1].append(document)
        else:
            made.append([document])
    return made


def family_tokens(family: Sequence[Document]) -> int:
    """Tokens that go through the model for documents of one prompt."""
    return len(family[0].prompt.token_ids) + sum(len(document.rollout.token_ids) for document in family)


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
) -> Batch:
    """Packs the documents into one row, in their order."""
    lengths = np.array([len(document) for document in documents])
    prompts = [len(document.prompt.token_ids) for document in documents]
    starts = np.concatenate([[0], lengths.cumsum()])
    owners = np.repeat(np.arange(len(documents)), lengths)
    mask = _spread(documents, lambda document: document.rollout.loss_mask)
    return Batch(
        token_ids=torch.from_numpy(
            np.concatenate([ids for d in documents for ids in (d.prompt.token_ids, d.rollout.token_ids)]).astype(
                np.int64
            )
        ),
        position_ids=torch.from_numpy(np.arange(starts[-1]) - starts[owners]),
        document_ids=torch.from_numpy(owners),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)),
        loss_mask=torch.from_numpy(mask),
        advantages=torch.from_numpy(np.repeat([d.advantage for d in documents], lengths).astype(np.float32) * mask),
        rollout_logprobs=torch.from_numpy(
            _spread(documents, lambda document: document.rollout.rollout_logprobs) * mask
        ),
        temperature=temperature,
        num_loss_tokens=num_loss_tokens,
        num_rollouts=num_rollouts,
        minibatch=minibatch,
        answer_starts=tuple(prompts),
        digests=tuple(document.rollout.digest for document in documents),
        ordinals=tuple(document.prompt.ordinal for document in documents),
    )


def _spread(documents: Sequence[Document], of_answer: Callable[[Document], Sequence[float]]) -> np.ndarray:
    """float32 `[T]`: one value a token of the answers, 0 on the prompts."""
    values = [part for d in documents for part in (np.zeros(len(d.prompt.token_ids)), of_answer(d))]
    return np.concatenate(values).astype(np.float32)
