"""Decoding as torch runs it, without captured graphs: on CPUs, and for models that cannot be captured.

Each rollout that is being written has a slot. The keys and values of a slot start at column 0, in order of position,
and each slot has its own length. So slots of any age share a batch, leave it and join it. Columns beyond a slot's
length hold garbage and are masked.

A prefix group goes through the model once and its keys and values are copied to the group's slots. Finished rollouts
leave the batch and waiting ones take their place.

On a CPU, large linear layers keep a copy of their weights in the order that oneDNN prefers, made again at each sync. A
decode step multiplies few rows with every weight and takes about half the time of torch's own product with that copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from podium.engine.decoding.queue import Arrivals, Job, Outcome
from podium.engine.decoding.sampling import Kind, RowSampling, draw, kind_of
from podium.model.forward import capped, decoder_states, head_weight, is_plain_linear, logits_of, softcap

LEAVE_SHARE = 0.25
"""Finished slots leave the batch only when they are this share of it, because leaving copies the cache."""
STEPS_PER_TURN = 8
"""Tokens per rollout after which other work of the device thread gets its turn."""
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


class PlainDecoder:
    """`version` returns the version of the weights. At most `concurrency` rollouts are written at the same time."""

    def __init__(
        self,
        model: PreTrainedModel,
        compute_dtype: torch.dtype | None,
        concurrency: int,
        version: Callable[[], int],
    ) -> None:
        self._model, self._compute_dtype, self._concurrency, self._version = model, compute_dtype, concurrency, version
        self._device = model.device

    @torch.inference_mode()
    def run(self, arrivals: Arrivals) -> Iterator[list[Outcome]]:
        waiting: deque[Job] = deque()
        slots: Slots | None = None
        steps = 0
        while True:
            waiting.extend(arrivals.take())
            slots = self._admit(slots, waiting)
            if slots is None:
                return
            ids, logprobs = draw(slots.logits, slots.seed, slots.drawn, slots.sampling, slots.kind)
            slots.record(ids, logprobs)
            steps += 1
            num_finished = int(slots.finished.sum())
            is_leaving = num_finished >= max(1, LEAVE_SHARE * len(slots))
            if is_leaving or steps % STEPS_PER_TURN == 0:
                outcomes = self._outcomes(slots)
                gone = slots.finished.clone() if is_leaving else None
                yield outcomes
                if gone is not None:
                    staying = (~gone).nonzero()[:, 0]
                    slots, ids = (slots.select(staying), ids[staying]) if len(staying) else (None, ids)
            if slots is not None:
                self._advance(slots, ids)

    def _outcomes(self, slots: Slots) -> list[Outcome]:
        """Answers that have ended since the last time, and tokens of jobs with a listener. Cancelled jobs end here."""
        found: list[Outcome] = []
        ended = (slots.finished & ~slots.delivered).nonzero()[:, 0].tolist()
        for row in ended:
            count = int(slots.drawn[row])
            ids, logprobs = slots.ids[row, :count].tolist(), slots.logprobs[row, :count].tolist()
            found.append((slots.jobs[row], slots.jobs[row].ended(ids, logprobs, self._version())))
        slots.delivered[ended] = True
        for row, job in enumerate(slots.jobs):
            if job.is_cancelled and not slots.finished[row]:
                slots.finished[row] = slots.delivered[row] = True
            elif job.on_tokens is not None and not slots.finished[row]:
                found.append((job, slots.ids[row, : int(slots.drawn[row])].tolist()))
        return found

    def _admit(self, slots: Slots | None, waiting: deque[Job]) -> Slots | None:
        """Waiting groups join as soon as there are slots for all their rollouts; a huge one joins alone."""
        free = self._concurrency - (0 if slots is None else len(slots))
        joining: list[list[Job]] = []
        while waiting:
            group = _first_group(waiting)
            if len(group) > free and (slots is not None or joining):
                break
            for _ in group:
                waiting.popleft()
            if wanted := [job for job in group if not job.is_cancelled]:
                joining.append(wanted)
                free -= len(wanted)
        if not joining:
            return slots
        new = self._prefill(joining)
        return new if slots is None else slots.join(new)

    def _prefill(self, groups: list[list[Job]]) -> Slots:
        """Each group's tokens once through the model, padded on the right, where the causal mask hides the padding."""
        prompts = [torch.tensor(group[0].request.token_ids, device=self._device) for group in groups]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        table = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        cache = DynamicCache()
        positions = torch.arange(table.shape[1], device=self._device).expand_as(table)
        hidden = self.hidden(table, positions, None, cache)
        logits = self.logits(hidden[torch.arange(len(table), device=self._device), lengths - 1])
        rows = torch.tensor([row for row, group in enumerate(groups) for _ in group], device=self._device)
        jobs = [job for group in groups for job in group]
        samplings = [job.request.sampling for job in jobs]
        for job in jobs:
            job.first_version = self._version()
        room = (len(rows), max(each.max_new_tokens for each in samplings))
        return Slots(
            jobs=jobs,
            kind=kind_of(samplings),
            sampling=RowSampling.of(samplings, self._device),
            seed=torch.tensor([job.request.seed for job in jobs], device=self._device),
            length=lengths[rows],
            drawn=torch.zeros_like(rows),
            finished=torch.zeros_like(rows, dtype=torch.bool),
            delivered=torch.zeros_like(rows, dtype=torch.bool),
            logits=logits[rows],
            ids=torch.zeros(room, dtype=torch.long, device=self._device),
            logprobs=torch.zeros(room, device=self._device),
            layers=[SlotLayer(layer.keys[rows], layer.values[rows]) for layer in cache.layers],  # type: ignore[index]
        )

    def _advance(self, slots: Slots, ids: torch.Tensor) -> None:
        """One decode step: the tokens just drawn go through the model."""
        hidden = self.hidden(ids[:, None], slots.length[:, None], slots.mask(), slots.next_cache())
        slots.logits = self.logits(hidden[:, -1])
        slots.length = slots.length + ~slots.finished  # a finished slot overwrites its last column

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, cache: Cache
    ) -> torch.Tensor:
        """The last layer's states `[rows, tokens, hidden]`."""
        with torch.autocast(self._device.type, dtype=self._compute_dtype, enabled=self._compute_dtype is not None):
            return decoder_states(
                self._model,
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
            )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        dtype = self._compute_dtype or hidden.dtype
        head = self._model.get_output_embeddings()
        if isinstance(head, PackedLinear):
            return capped(head(hidden), softcap(self._model))
        return logits_of(hidden.to(dtype), head_weight(self._model).to(dtype), softcap(self._model))


def _first_group(waiting: deque[Job]) -> list[Job]:
    """The jobs at the head of the queue that share their tokens."""
    first = waiting[0].request
    found: list[Job] = []
    for job in waiting:
        same = job.request.prefix_group == first.prefix_group and job.request.token_ids == first.token_ids
        if found and (first.prefix_group is None or not same):
            break
        found.append(job)
    return found


LEAST_WEIGHTS = 1 << 17
"""A layer with fewer weights is not packed: it would gain less than the call costs."""
ROWS = 64
"""The order is chosen for this number of rows; it works for other numbers too."""


class PackedLinear(torch.nn.Module):
    """Replaces a linear layer and keeps its parameters, but multiplies with the weights of the last `pack`."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.pack(layer.weight)

    def pack(self, weight: torch.Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def unpacked(self) -> torch.Tensor:
        """The weights that it computes with, in their plain order."""
        return self._packed.to_dense()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")


def pack_layers(model: PreTrainedModel) -> list[PackedLinear]:
    """Replaces the large layers, the LM head included, by packed ones if this torch can compute them."""
    packed = []
    for name, layer in _large_layers(model):
        if isinstance(layer, PackedLinear):  # another engine over the same layers has packed it
            layer.pack(layer.weight)
        else:
            layer = PackedLinear(layer)
            model.set_submodule(name, layer)
        packed.append(layer)
    return packed


def packed_weights(model: PreTrainedModel) -> list[torch.Tensor]:
    """The weights of which `pack_layers` makes, or has made, a copy."""
    return [layer.weight for _, layer in _large_layers(model)]


def _large_layers(model: PreTrainedModel) -> list[tuple[str, Any]]:
    if model.device.type != "cpu" or model.dtype != torch.float32 or not _can_pack():
        return []
    linear: list[tuple[str, Any]] = [
        (name, layer)
        for name, layer in model.named_modules()
        if is_plain_linear(layer) or isinstance(layer, PackedLinear)
    ]
    return [(name, layer) for name, layer in linear if layer.weight.numel() >= LEAST_WEIGHTS]


def _can_pack() -> bool:
    """Whether torch's two operators for packed layers work; they are not part of its public interface."""
    layer: Any = torch.nn.utils.skip_init(torch.nn.Linear, 16, 16, bias=False)  # draws no random numbers
    x = torch.arange(16.0)[None]
    try:
        with torch.no_grad():
            layer.weight.copy_(2 * torch.eye(16))
            return torch.allclose(PackedLinear(layer)(x), 2 * x)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
