"""Stage 5: groups to batches of at most `max_tokens_per_batch` tokens.

A document is a prompt and one answer. Documents are placed longest first into the fullest batch that still has room
(best fit); one that is longer than the limit becomes a batch of its own. Only rollouts without a reward or without a
loss token are dropped. After packing every tensor is flat over tokens, `[T]`.

Ranks work in step, so each must get as many batches as the others, of about as many tokens. With several ranks the
documents are therefore spread over the batches instead of filling one after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from podium.records import Batch, Group, Prompt, Rollout
from podium.settings.tables import Settings


def build_pack(
    settings: Settings, max_tokens_per_batch: int, ranks: int = 1
) -> Callable[[Sequence[Group]], list[Batch]]:
    """Groups in, batches out, the same number for each rank."""
    return partial(
        pack,
        max_tokens_per_batch=max_tokens_per_batch,
        temperature=settings.rollout.options.get("temperature", 1.0),
        minibatches=settings.trainer.options.get("minibatches_per_step", 1),
        shared_prefix=settings.pack.shared_prefix,
        ranks=ranks,
    )


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
    ranks: int = 1,
) -> list[Batch]:
    """The batches of a step, update by update; each has its update's totals, so that averages are over the update.

    A group is never divided between two updates; with fewer groups than `minibatches` there are fewer updates.
    `shared_prefix`: a prompt counts once for all its answers in a batch, which therefore stay together. Rank r takes
    `batches[r::ranks]`. In every update all ranks get the same number, if necessary with a batch that trains nothing.
    """
    batches: list[Batch] = []
    for number in range(minibatches):
        documents = [
            Document(group.prompt, group.rollouts[k], group.advantages[k])
            for group in groups[number::minibatches]
            for k in group.trainable
        ]
        num_loss_tokens = sum(sum(document.rollout.loss_mask) for document in documents)
        units = families(documents, max_tokens_per_batch) if shared_prefix else [[document] for document in documents]
        lengths = [family_tokens(unit) for unit in units]
        bins = best_fit(lengths, max_tokens_per_batch)
        if ranks > 1:
            bins = even_bins(lengths, max_tokens_per_batch, ranks, at_least=len(bins))
        batches += [
            to_batch(
                [document for index in bin_ for document in units[index]] or [spare(documents)],
                num_loss_tokens=num_loss_tokens,
                num_rollouts=len(documents),
                temperature=temperature,
                minibatch=number,
            )
            for bin_ in bins
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


def even_bins(lengths: Sequence[int], room: int, ranks: int, at_least: int) -> list[list[int]]:
    """Indices by bin; rank r gets `bins[r::ranks]`. A bin is empty if there is nothing left to put into it.

    Every rank has the same number of bins: the smallest that gives `at_least` bins in total and that the documents fit
    into. The ranks' tokens differ by no more than the longest document.
    """
    per_rank = -(-at_least // ranks)
    while (bins := spread(lengths, room, per_rank * ranks)) is None:
        per_rank += 1
    held = [0] * ranks
    dealt: list[list[int]] = []
    while bins:  # a round: of the fullest bins that are left, the rank with the fewest tokens gets the fullest one
        by_need = sorted(range(ranks), key=lambda rank: held[rank])
        hand = dict(zip(by_need, bins[:ranks], strict=True))
        dealt += [hand[rank] for rank in range(ranks)]
        held = [held[rank] + sum(lengths[index] for index in hand[rank]) for rank in range(ranks)]
        bins = bins[ranks:]
    return dealt


def spread(lengths: Sequence[int], room: int, count: int) -> list[list[int]] | None:
    """Indices by bin, the fullest bin first; None if a bin overflows. The longest go first, into the emptiest bin."""
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        emptiest = min(range(count), key=lambda b: filled[b])
        if bins[emptiest] and filled[emptiest] + lengths[index] > room:
            return None
        bins[emptiest].append(index)
        filled[emptiest] += lengths[index]
    return [sorted(bins[b]) for b in sorted(range(count), key=lambda b: -filled[b])]


def spare(documents: Sequence[Document]) -> Document:
    """A copy of the shortest document without a loss token: it adds exactly 0 to loss, gradient and metrics."""
    shortest = min(documents, key=len)
    rollout = replace(shortest.rollout, loss_mask=(0,) * len(shortest.rollout.loss_mask))
    return Document(shortest.prompt, rollout, advantage=0.0)


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
    """float32 `[T]`: one value per token of the answers, 0 on the prompts."""
    values = [part for d in documents for part in (np.zeros(len(d.prompt.token_ids)), of_answer(d))]
    return np.concatenate(values).astype(np.float32)
