"""From a batch to the row of tokens that goes through the model.

Plain: the batch's own tokens. With shared prefixes, a prompt occurs once, before all answers of its group in the batch
(G·(P + R) tokens become P + G·R). Every answer still attends to its prompt's keys and values, and the logprob of its
first token comes from the prompt's last state. The results are the same, so no other code knows the difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from podium.records import Batch


@dataclass(frozen=True)
class SharedKeys:
    """Where each segment's keys come from, if several segments attend to the same prompt. K keys, L tokens."""

    places: torch.Tensor
    """int64 `[K]`, the token of the row that each key belongs to."""
    own: torch.Tensor
    """int64 `[L]`, the index of each token's key in its own segment."""
    prompt_tokens: torch.Tensor
    """int64 `[M]`, the tokens of shared prompts."""
    copies: torch.Tensor
    """int64 `[M, answers]`, the keys of each prompt token in the segments of its answers; K if there is none."""


@dataclass(frozen=True)
class Table:
    """Segments of similar length, one per padded row: for attention without a kernel for packed rows."""

    count: int
    longest_query: int
    longest_key: int
    queries: torch.Tensor
    """int64, the row's tokens that are in the table."""
    query_places: torch.Tensor
    """int64, their places in a flattened `[count, longest_query]` table."""
    keys: torch.Tensor
    """int64, the keys that are in the table."""
    key_places: torch.Tensor
    """int64, their places in a flattened `[count, longest_key]` table."""
    keys_before: torch.Tensor
    """int64 `[count]`, number of keys of each segment before its first query."""


@dataclass(frozen=True)
class Segments:
    """Which keys a token may attend to. A segment's last query is at its last key, the query before it at the key
    before that, and so on."""

    query_starts: torch.Tensor
    """int32 `[S + 1]`"""
    key_starts: torch.Tensor
    """int32 `[S + 1]`"""
    longest_query: int
    longest_key: int
    tables: tuple[Table, ...]
    """The same segments by length: one table for those longer than half of the longest, one for those longer than half
    of that, …"""
    shared: SharedKeys | None = None
    """None: a segment's keys are its own tokens, K = L."""

    @classmethod
    def of(cls, query_lengths: np.ndarray, key_lengths: np.ndarray, shared: SharedKeys | None) -> Segments:
        query_starts, key_starts = _starts(query_lengths), _starts(key_lengths)
        sizes = np.log2(key_lengths.max() / key_lengths).astype(int)  # 0 for the longest ones
        members = [np.flatnonzero(sizes == size) for size in np.unique(sizes)]
        return cls(
            query_starts=torch.from_numpy(query_starts.astype(np.int32)),
            key_starts=torch.from_numpy(key_starts.astype(np.int32)),
            longest_query=int(query_lengths.max()),
            longest_key=int(key_lengths.max()),
            tables=tuple(
                _table(query_starts[some], query_lengths[some], key_starts[some], key_lengths[some]) for some in members
            ),
            shared=shared,
        )


@dataclass(frozen=True)
class PackedRow:
    """L tokens for the decoder, and where to find the states of the batch's N loss tokens."""

    token_ids: torch.Tensor
    """int64 `[L]`"""
    position_ids: torch.Tensor
    """int64 `[L]`"""
    segments: Segments
    loss_places: torch.Tensor
    """int64 `[N]`, places of the loss tokens in the batch."""
    states: torch.Tensor
    """int64 `[N]`, for each loss token the token of the row before it."""


def row_of(batch: Batch, *, shared_prefix: bool = False) -> PackedRow:
    """Batch and row are both on the CPU."""
    places = batch.loss_mask.nonzero()[:, 0]
    if not shared_prefix:
        lengths = batch.cu_seqlens.diff().numpy()
        return PackedRow(batch.token_ids, batch.position_ids, Segments.of(lengths, lengths, None), places, places - 1)
    taken, row_of_token, segments = _shared_row(batch)
    return PackedRow(batch.token_ids[taken], batch.position_ids[taken], segments, places, row_of_token[places - 1])


def _runs(batch: Batch) -> Iterator[tuple[int, int]]:
    """(first, last + 1) of adjacent documents with the same prompt."""
    first = 0
    for number in range(1, batch.num_documents + 1):
        if number == batch.num_documents or batch.ordinals[number] != batch.ordinals[first]:
            yield first, number
            first = number


def _shared_row(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """(the batch's token at each place of the row, the place of each token of the batch, the segments).

    One segment per prompt, then one per answer to it, run by run.
    """
    runs = list(_runs(batch))
    sizes = np.array([last - first for first, last in runs])
    prompt_lengths = np.array([batch.answer_starts[first] for first, _ in runs])
    prompts = _starts(sizes + 1)[:-1]  # segments of prompts
    answers = np.setdiff1d(np.arange(sizes.sum() + len(runs)), prompts)  # segments of answers
    prompt_of = np.repeat(prompts, sizes + 1)

    starts = batch.cu_seqlens.numpy().astype(np.int64)
    begins = np.empty(len(prompt_of), dtype=np.int64)  # where a segment's tokens are in the batch
    begins[prompts] = starts[[first for first, _ in runs]]
    begins[answers] = starts[:-1] + batch.answer_starts
    lengths = np.empty_like(begins)
    lengths[prompts], lengths[answers] = prompt_lengths, starts[1:] - begins[answers]
    before = np.zeros_like(begins)  # keys that a segment attends to before its own
    before[answers] = np.repeat(prompt_lengths, sizes)

    places, keys = _starts(lengths)[:-1], _starts(before + lengths)
    copies = np.full((len(runs), sizes.max()), -1)
    copies[np.repeat(np.arange(len(runs)), sizes), _ranges(np.zeros_like(sizes), sizes)] = keys[answers]
    copies = np.repeat(copies, prompt_lengths, axis=0)
    offsets = _ranges(np.zeros_like(prompt_lengths), prompt_lengths)[:, None]
    both = np.stack([places[prompt_of], places], 1), np.stack([before, lengths], 1)  # a segment's prompt, then itself
    shared = SharedKeys(
        places=torch.from_numpy(_ranges(both[0].ravel(), both[1].ravel())),
        own=torch.from_numpy(_ranges(keys[:-1] + before, lengths)),
        prompt_tokens=torch.from_numpy(_ranges(places[prompts], prompt_lengths)),
        copies=torch.from_numpy(np.where(copies < 0, keys[-1], copies + offsets)),
    )
    return (
        torch.from_numpy(_ranges(begins, lengths)),
        torch.from_numpy(_ranges(both[0][answers].ravel(), both[1][answers].ravel())),
        Segments.of(lengths, before + lengths, shared),
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], lengths.cumsum()])


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """For each pair of start and length: start, start + 1, …, start + length − 1."""
    return np.arange(lengths.sum()) + np.repeat(starts - _starts(lengths)[:-1], lengths)


def _table(
    query_starts: np.ndarray, query_lengths: np.ndarray, key_starts: np.ndarray, key_lengths: np.ndarray
) -> Table:
    rows = np.arange(len(query_lengths))
    longest_query, longest_key = int(query_lengths.max()), int(key_lengths.max())
    return Table(
        count=len(rows),
        longest_query=longest_query,
        longest_key=longest_key,
        queries=torch.from_numpy(_ranges(query_starts, query_lengths)),
        query_places=torch.from_numpy(_ranges(rows * longest_query, query_lengths)),
        keys=torch.from_numpy(_ranges(key_starts, key_lengths)),
        key_places=torch.from_numpy(_ranges(rows * longest_key, key_lengths)),
        keys_before=torch.from_numpy(key_lengths - query_lengths),
    )
