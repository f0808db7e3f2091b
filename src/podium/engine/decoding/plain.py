"""Decoding as torch runs it, without captured graphs: on CPUs, and for models that cannot be captured.

A prefix group goes through the model once and its keys and values are copied to the group's slots. Finished rollouts
leave the batch and waiting ones take their place.

On a CPU, large linear layers keep a copy of their weights in the order that oneDNN prefers, made again at each sync. A
decode step multiplies few rows with every weight and takes about half the time of torch's own product with that copy.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from podium.engine.decoding.queue import Arrivals, Job, Outcome
from podium.engine.decoding.sampling import RowSampling, draw, kind_of
from podium.engine.decoding.slots import SlotLayer, Slots
from podium.model.forward import capped, decoder_states, head_weight, logits_of, softcap
from podium.model.products import is_plain_linear

LEAVE_SHARE = 0.25
"""Finished slots leave the batch only when they are this share of it, because leaving copies the cache."""
STEPS_PER_TURN = 8
"""Tokens per rollout after which other work of the device thread gets its turn."""


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
