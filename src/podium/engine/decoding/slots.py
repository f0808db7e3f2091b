"""The slots of plain decoding: one per rollout that is being written, and the key-value cache under them.

The keys and values of a slot start at column 0, in order of position, and each slot has its own length. So slots of any
age share a batch, leave it and join it. Columns beyond a slot's length hold garbage and are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from podium.engine.decoding.queue import Job
from podium.engine.decoding.sampling import Kind, RowSampling, kind_of

GROWTH = 64
"""Columns added when the cache is full, or fewer, where answers may not have so many tokens."""


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: `[slots, heads, columns, head_dim]`."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.write_columns: torch.Tensor | None = None
        """int64 `[slots]`, where the next token of each slot goes."""

    def lazy_initialization(self, key_states, value_states) -> None:
        raise AssertionError("slots are made from a prefilled prompt")

    def update(self, key_states, value_states, *args, **kwargs):
        """Writes one token per slot and returns the columns in use."""
        assert self.keys is not None
        assert self.values is not None
        assert self.write_columns is not None
        rows = torch.arange(len(key_states), device=key_states.device)
        self.keys[rows, :, self.write_columns] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[rows, :, self.write_columns] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    used: int = 0
    """Columns that any slot uses, the token being written included."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used, 0

    def get_seq_length(self) -> int:
        return self.used

    def get_max_length(self) -> int:
        return -1


@dataclass
class Slots:
    """Every tensor has one row per slot."""

    jobs: list[Job]
    """The job that each slot works for."""
    kind: Kind
    """How the rows draw their tokens."""
    sampling: RowSampling
    seed: torch.Tensor
    """int64"""
    length: torch.Tensor
    """int64, columns in use: prompt and written tokens that went through the model."""
    drawn: torch.Tensor
    """int64, tokens of the answer so far; does not rise any more once finished."""
    finished: torch.Tensor
    """bool, whether the answer has ended; the slot may stay in the batch for a while."""
    delivered: torch.Tensor
    """bool, whether the answer has been handed out."""
    logits: torch.Tensor
    """float32 `[slots, vocabulary]`, for the next draw."""
    ids: torch.Tensor
    """int64 `[slots, longest answer]`, the answer; valid up to `drawn`."""
    logprobs: torch.Tensor
    """float32 `[slots, longest answer]`"""
    layers: list[SlotLayer] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.jobs)

    def record(self, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Adds the drawn tokens to the answers that have not ended, and ends those that stop or are full."""
        rows = (~self.finished).nonzero()[:, 0]
        self.ids[rows, self.drawn[rows]] = ids[rows]
        self.logprobs[rows, self.drawn[rows]] = logprobs[rows]
        self.drawn[rows] += 1
        stops = (ids[rows, None] == self.sampling.stop_ids[rows]).any(-1)
        self.finished[rows] = stops | (self.drawn[rows] >= self.sampling.limit[rows])

    def select(self, rows: torch.Tensor) -> Slots:
        """The given slots only."""
        layers = [SlotLayer(layer.keys[rows], layer.values[rows]) for layer in self.layers]  # type: ignore[index]
        jobs = [self.jobs[row] for row in rows.tolist()]
        columns = {name: getattr(self, name)[rows] for name in _ROWS}
        return Slots(jobs, kind_of_jobs(jobs), self.sampling.select(rows), **columns, layers=layers)

    def join(self, other: Slots) -> Slots:
        """Both sets of slots, in order."""
        layers = []
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            columns = max(mine.keys.shape[2], theirs.keys.shape[2])  # type: ignore[union-attr]
            keys = [widen(layer.keys, columns) for layer in (mine, theirs)]
            values = [widen(layer.values, columns) for layer in (mine, theirs)]
            layers.append(SlotLayer(torch.cat(keys), torch.cat(values)))
        longest = max(self.ids.shape[1], other.ids.shape[1])
        rows = {
            name: torch.cat([_padded(getattr(each, name), name, longest) for each in (self, other)]) for name in _ROWS
        }
        jobs = self.jobs + other.jobs
        return Slots(jobs, kind_of_jobs(jobs), self.sampling.join(other.sampling), **rows, layers=layers)

    def next_cache(self) -> Cache:
        """The cache for one more token per slot, grown if need be."""
        used = int(self.length.max()) + 1
        for layer in self.layers:
            if layer.keys.shape[2] < used:  # type: ignore[union-attr]
                columns = used + min(GROWTH, self.ids.shape[1])
                layer.keys, layer.values = widen(layer.keys, columns), widen(layer.values, columns)
            layer.used, layer.write_columns = used, self.length
        return Cache(layers=list(self.layers))

    def mask(self) -> torch.Tensor:
        """bool `[slots, 1, 1, columns in use]`: which keys the next token may look at, itself included."""
        columns = torch.arange(int(self.length.max()) + 1, device=self.length.device)
        return (columns <= self.length[:, None])[:, None, None, :]


_ROWS = ("seed", "length", "drawn", "finished", "delivered", "logits", "ids", "logprobs")
_PER_TOKEN = ("ids", "logprobs")


def kind_of_jobs(jobs: Sequence[Job]) -> Kind:
    return kind_of([job.request.sampling for job in jobs])


def _padded(tensor: torch.Tensor, name: str, longest: int) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, longest - tensor.shape[1])) if name in _PER_TOKEN else tensor


def widen(tensor: torch.Tensor | None, columns: int) -> torch.Tensor:
    """The same keys or values with room for `columns`."""
    assert tensor is not None
    wide = tensor.new_empty(*tensor.shape[:2], columns, tensor.shape[3])
    wide[:, :, : tensor.shape[2]] = tensor
    wide[:, :, tensor.shape[2] :] = 0  # masked, yet NaN in it would come through
    return wide
