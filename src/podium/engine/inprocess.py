"""The reference engine: samples from the trainer's own weights, in the trainer's process.

One request per call, any number of calls at the same time; a decoder batches whatever is outstanding. Weights in
bfloat16 exist once: the engine reads the trainer's base, and a push fills its own buffers for the adapter, which is a
separate product. Under LoRA in float32 the sampled weights are a scratch copy, rebuilt as base + scale·B·A at each
load: sampling through adapter layers is slower, and merging in place would drift.

On CUDA the decode step is replayed as a CUDA graph (`cuda/captured.py`), in the precision in which the trainer
computes: for bfloat16 products over float32 weights the linear layers are copies in bfloat16. With a snapshot of the
weights the engine can write while the trainer trains, on a stream of its own. The `PlainDecoder` at the end of this
file is for CPUs, where large layers are packed, and for models that cannot be captured.
"""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.nn.functional import pad
from torch.utils._triton import has_triton
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from podium.engine.cuda.captured import CapturedDecoder
from podium.engine.cuda.replayed_score import ReplayedScore
from podium.engine.decoding.linear import AdaptedLinear, PackedLinear, join_weights, pack_layers
from podium.engine.decoding.queue import Arrivals, Decoder, Job, Outcome, RequestQueue, check_room
from podium.engine.decoding.sampling import Kind, RowSampling, draw, kind_of
from podium.engine.decoding.trial import captured_gap, gaps, refuse_gap, refusing_to_decode, small_gap, small_policy
from podium.errors import first_line
from podium.model.device_thread import SHARED, beside_the_trainer
from podium.model.evidence import Held, Shown, branch_input, branch_views, named_trained, shown
from podium.model.forward import (
    ExactLinear,
    capped,
    decoder_states,
    head_weight,
    is_plain_linear,
    logits_of,
    sequence_logprobs,
    softcap,
)
from podium.model.handoff import read_published
from podium.model.load import Policy
from podium.model.self_check import SMALL_TOLERANCE, tolerance
from podium.records import Answer, EngineTraits, PrefixGroup, Request, Sampling
from podium.stages import OnTokens

DECODING_MARGIN = 2.0
"""The probe has few tokens, so their mean may be further off than that of the check at load."""
PROBE = [Request(tuple(range(1, 6)), Sampling(max_new_tokens=4), seed, PrefixGroup("probe", 2)) for seed in (1, 2)]
"""What is decoded to compare with a plain forward pass."""
SCORED_AT_ONCE = 256
"""Tokens of a text, so that not all logits of a long one exist at the same time."""
LEAVE_SHARE = 0.25
"""Finished slots leave the batch only when they are this share of it, because leaving copies the cache."""
STEPS_PER_TURN = 8
"""Tokens per rollout after which other work of the device thread gets its turn."""
GROWTH = 64
"""Columns added when the cache is full, or fewer, where answers may not have so many tokens."""


class Inprocess:
    """`snapshot`: sample from a copy of the trained weights, for schedules that train between two syncs.

    `compute_dtype` is that of the trainer's matrix products if autocast is on there; on a CPU, weights in float32 are
    sampled in float32. `overlaps` asks for a thread and a stream beside the trainer's, for an engine on CUDA with a
    snapshot. `cache_bytes` is the memory for keys and values on CUDA; None: most of what is free at the first request.
    """

    traits = EngineTraits(
        channels=("shared", "adapter", "disk"), shares_weights=True, runs_in_worker=True, shows_weights=True
    )

    def __init__(
        self,
        policy: Policy,
        snapshot: bool = False,
        compute_dtype: torch.dtype | None = None,
        overlaps: bool = False,
        cache_bytes: int | None = None,
        *,
        concurrency: Annotated[int, Field(ge=1, description="rollouts written at the same time")] = 512,
    ) -> None:
        self.policy_version: int | None = None
        if policy.device.type == "cuda":  # batches of all sizes leave gaps of all sizes otherwise, 8 GB of 53 once
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        self._model, self._device, self._expected = policy.twin, policy.device, policy.named_weights
        self._compute_dtype = compute_dtype if self._device.type == "cuda" else None
        if policy.model.dtype != torch.float32:
            self._compute_dtype = policy.model.dtype
        computes_in = self._compute_dtype or policy.model.dtype
        self._allowed_gap = DECODING_MARGIN * tolerance(self._model, computes_in)
        """Of the probe's logprobs, on average, from those of a plain forward pass. Measured here, while the layers are
        still the model's own."""
        self.traits = replace(
            type(self).traits,
            dtype=str(computes_in).removeprefix("torch."),
            keeps_order=self._device.type == "cpu",
        )
        self._max_context_tokens = policy.max_context_tokens
        self._scale = policy.adapter_scale
        self._base: dict[str, torch.Tensor] = {}
        """Under LoRA: the untouched weights of the adapted layers."""
        self._applied: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """A and B of the adapter that was last added to each of these layers."""
        if snapshot and policy.peft is None:
            self._copy_weights()
        ranks = {
            name.rpartition(".lora_")[0]: getattr(a, "ds_shape", a.shape)[0]  # ZeRO-3 leaves a placeholder of size 0
            for name, a in named_trained(policy.model)
            if name.endswith(".lora_A")
        }
        self._adapted = list(ranks)
        if self._compute_dtype is not None:
            self._halve(ranks)
        else:
            self._pack(ranks)
        self._plain = PlainDecoder(self._model, self._compute_dtype, concurrency, self._version)
        self._small = small_policy(policy)
        self._check_decoding()
        is_apart = overlaps and snapshot and self._device.type == "cuda"
        self._thread = beside_the_trainer(self._device) if is_apart else SHARED
        self._captured: CapturedDecoder | None = None
        self._is_compared = False
        """Whether captured decoding has been compared with a plain forward pass; done at the first request."""
        if self._device.type == "cuda" and has_triton():
            self._captured = CapturedDecoder(self._model, concurrency, self._compute_dtype, self._version, cache_bytes)
        elif self._device.type == "cuda":
            _warn_of_plain_decoding("Triton is not installed or does not know this GPU")
        self._replayed_score = ReplayedScore(self._model, self._compute_dtype)
        self._queue = RequestQueue(self._thread, self._decode)

    def _copy_weights(self) -> None:
        for module in self._model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, _frozen(parameter.detach().clone()))
        self._model.tie_weights()

    def _pack(self, adapted: Iterable[str]) -> None:
        """Large layers in the order that a CPU prefers; those with an adapter get weights of their own to merge it."""
        pack_layers(self._model)
        for layer in adapted:
            module = self._model.get_submodule(layer)
            self._base[layer] = module.weight.detach()  # type: ignore[union-attr]
            if not isinstance(module, PackedLinear):
                module.weight = _frozen(self._base[layer].clone())

    def _halve(self, ranks: dict[str, int]) -> None:
        """Linear layers in the trainer's precision, adapters beside them: what its autocast makes of them. Weights that
        have this precision stay the trainer's own."""
        head = self._model.get_output_embeddings()
        linears = [(n, m) for n, m in self._model.named_modules() if is_plain_linear(m) and m is not head]
        for _, module in linears:
            for name, parameter in module.named_parameters(recurse=False):
                is_bias_of_sums = name == "bias" and isinstance(module, ExactLinear)  # which are float32
                if parameter.dtype != self._compute_dtype and not is_bias_of_sums:
                    setattr(module, name, _frozen(parameter.detach().to(self._compute_dtype)))
        for name, module in linears:
            if name in ranks:
                self._model.set_submodule(name, AdaptedLinear(module, ranks[name], self._scale))
        join_weights(self._model)

    def _version(self) -> int:
        return self.policy_version or 0

    def _check_decoding(self) -> None:
        """Cached decoding, slot by slot, must give the logprobs of a plain forward pass. Asked once, also of the small
        copy of the model, whose windows are short."""
        with refusing_to_decode():
            refuse_gap(self._gap(self._plain), self._allowed_gap)
            if self._small is not None:
                refuse_gap(small_gap(Inprocess(self._small)._plain, self._small), SMALL_TOLERANCE)

    def _compare(self, requests: Sequence[Request]) -> None:
        """Captured decoding, with room for these requests, must give a plain forward pass's logprobs; otherwise it is
        switched off."""
        self._is_compared = True
        assert self._captured is not None
        try:
            self._captured.reserve(requests)
            gap = self._gap(self._captured)
            if self._small is not None:
                refuse_gap(captured_gap(self._small), SMALL_TOLERANCE)
        except Exception as error:  # whatever a compiler, a kernel or another architecture's modules raise
            reason = f"{type(error).__name__}: {first_line(error)}"
        else:
            if gap <= self._allowed_gap:
                return
            reason = f"its logprobs differ by {gap:.3g} from a plain forward pass's"
        self._captured = None
        _warn_of_plain_decoding(reason)

    def _gap(self, decoder: Decoder) -> float:
        """Mean difference between the probe's logprobs and those of a plain forward pass."""
        return fmean(gaps(decoder, PROBE, self._score))

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        check_room(request, self._max_context_tokens)
        if self._captured is not None:
            self._captured.check_room(request)
        return await self._queue.answer(request, on_tokens)

    def release(self, name: str) -> None:
        self._queue.release(name)

    def _decode(self, arrivals: Arrivals) -> Iterator[list[Outcome]]:
        if self._captured is not None and not self._is_compared and arrivals:
            self._compare(arrivals.peek())
        yield from (self._captured or self._plain).run(arrivals)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        can_replay = self._captured is not None and self._is_compared
        return await self._thread.run(self._replayed_score if can_replay else self._score, list(token_ids))

    @torch.no_grad()
    def _score(self, token_ids: list[int]) -> list[float]:
        """Through the head that samples: where it is packed, that one."""
        if not isinstance(self._model.get_output_embeddings(), PackedLinear):
            return sequence_logprobs(self._model, token_ids, compute_dtype=self._compute_dtype)
        ids = torch.tensor(token_ids)
        states = self._plain.hidden(ids[None], torch.arange(len(ids))[None], None, DynamicCache())[0, :-1]
        found: list[float] = []
        for some, targets in zip(states.split(SCORED_AT_ONCE), ids[1:].split(SCORED_AT_ONCE), strict=True):
            found += self._plain.logits(some).log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
        return found

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        await self._thread.run(self._load_weights, weights, version)

    async def load_folder(self, folder: Path, version: int) -> None:
        weights = await asyncio.to_thread(read_published, folder, dict(self._expected()), version)
        await self.load_weights(weights.items(), version)

    async def held(self) -> Held:
        """What it samples with, for the proof of a push."""
        return await self._thread.run(self._held)

    @torch.no_grad()
    def _held(self) -> Held:
        faults = self._captured.faults() if self._captured is not None else []
        return self._held_adapter(faults) if self._adapted else self._held_full(faults)

    def _held_full(self, faults: list[str]) -> Held:
        """Every parameter; where a layer multiplies with a packed copy, that copy is compared with its parameter."""
        stale = [
            f"{name} multiplies with a packed copy of other weights"
            for name, module in self._model.named_modules()
            if isinstance(module, PackedLinear) and not torch.equal(module.unpacked(), module.weight)
        ]
        parameters = {name: shown(tensor) for name, tensor in self._model.named_parameters()}
        return Held(parameters, faults=(*faults, *stale))

    def _held_adapter(self, faults: list[str]) -> Held:
        """The halves that each layer was given, and its branch.

        A merged layer has no branch. It is computed once more as base + scale·B·A, which gives the same bits.
        """
        tensors: dict[str, Shown] = {}
        scales: dict[str, float] = {}
        branches: dict[str, torch.Tensor] = {}
        for layer in self._adapted:
            module: Any = self._model.get_submodule(layer)
            if isinstance(module, AdaptedLinear):
                a, b, scales[layer] = module.a, module.b, module.scale
                output = module.branch(branch_input(a.shape[1], a.device, a.dtype))[0]
                branches[layer] = branch_views(output)
            elif layer not in self._applied:
                faults.append(f"no adapter was applied to {layer}")
                continue
            else:
                (a, b), scales[layer] = self._applied[layer], self._scale
                weight = module.unpacked() if isinstance(module, PackedLinear) else module.weight
                if not torch.equal(weight, self._merged(layer, a, b)):
                    faults.append(f"{layer} does not equal its base weights plus the adapter")
            tensors |= {f"{layer}.lora_A": shown(a), f"{layer}.lora_B": shown(b)}
        views = torch.stack([*branches.values()]).tolist() if branches else []
        return Held(tensors, scales, dict(zip(branches, views, strict=True)), faults=tuple(faults))

    def close(self) -> None:
        if self._thread is not SHARED:
            self._thread.close()

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """The version changes with the weights, on the thread that samples: what it makes next is of the new one."""
        stream = self._thread.stream
        if stream is not None:
            stream.wait_stream(torch.cuda.default_stream(self._device))  # where the trainer has made them
        self._take_weights(weights)
        self.policy_version = version
        if stream is not None:
            stream.synchronize()  # before the trainer changes them

    @torch.no_grad()
    def _take_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Full weights are copied unless they are the same memory; an adapter is applied to the base."""
        halves: dict[str, torch.Tensor] = {}
        own = dict(self._model.named_parameters())
        for name, tensor in weights:
            layer, _, half = name.rpartition(".lora_")
            if layer:
                halves[half] = tensor.to(self._device)  # from a folder it comes on the CPU
                if len(halves) == 2:
                    self._apply_adapter(layer, halves.pop("A"), halves.pop("B"))
            elif own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        if not self._adapted:
            for module in self._model.modules():
                if isinstance(module, PackedLinear):
                    module.pack(module.weight)
        if self._captured is not None:
            self._captured.take_weights()

    def _apply_adapter(self, layer: str, a: torch.Tensor, b: torch.Tensor) -> None:
        module = self._model.get_submodule(layer)
        if isinstance(module, AdaptedLinear):
            module.load(a, b)
            return
        if isinstance(module, PackedLinear):
            module.pack(self._merged(layer, a, b))
        else:
            module.weight.copy_(self._merged(layer, a, b))  # type: ignore[union-attr]
        self._applied[layer] = a.clone(), b.clone()

    def _merged(self, layer: str, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """base + scale·B·A"""
        return torch.addmm(self._base[layer].to(a.dtype), b, a, alpha=self._scale)


def _warn_of_plain_decoding(reason: str) -> None:
    warnings.warn(f"rollouts are written without CUDA graphs, several times slower: {reason}", stacklevel=2)


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


# ---- Plain decoding, as torch runs it


class SlotLayer(DynamicLayer):
    """Keys and values of one layer: `[slots, heads, columns, head_dim]`."""

    keys: torch.Tensor  # type: ignore[assignment]
    values: torch.Tensor  # type: ignore[assignment]

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True
        self.used = 0
        """Columns that any slot uses, the token being written included."""
        self.write_columns: torch.Tensor | None = None
        """int64 `[slots]`, where the next token of each slot goes."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Writes one token per slot and returns the columns in use."""
        rows = torch.arange(len(key_states), device=key_states.device)
        for cached, new in ((self.keys, key_states), (self.values, value_states)):
            cached[rows, :, self.write_columns] = new[:, :, 0].to(cached.dtype)
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.used, 0

    def get_seq_length(self) -> int:
        return self.used


@dataclass(eq=False)
class Slot:
    """One rollout that is being written."""

    job: Job
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    has_ended: bool = False
    """Whether nothing more is written; the slot may stay in the batch for a while."""
    is_delivered: bool = False
    """Whether the answer has been handed out, or nobody waits for it."""

    def write(self, token: int, logprob: float) -> None:
        """Adds a token to the answer, and ends it if it stops or is full."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        sampling = self.job.request.sampling
        self.has_ended = token in sampling.stop_ids or len(self.ids) == sampling.max_new_tokens


class SlotBatch:
    """The slots that go through the model together. Every tensor has one row per slot.

    The keys and values of a slot start at column 0, in order of position, and each slot has its own length. So slots of
    any age share a batch, leave it and join it. Columns beyond a slot's length hold garbage and are masked.
    """

    def __init__(
        self, slots: list[Slot], length: torch.Tensor, logits: torch.Tensor, layers: Sequence[SlotLayer]
    ) -> None:
        self.slots, self.layers = slots, layers
        self.length = length
        """int64, columns in use: prompt and written tokens that went through the model."""
        self.logits = logits
        """`[slots, vocabulary]`, for the next draw."""
        samplings = [slot.job.request.sampling for slot in slots]
        self._kind: Kind = kind_of(samplings)
        self._sampling = RowSampling.of(samplings, logits.device)
        self._seed = torch.tensor([slot.job.request.seed for slot in slots], device=logits.device)
        self._drawn = torch.tensor([len(slot.ids) for slot in slots], device=logits.device)
        self._longest = max(sampling.max_new_tokens for sampling in samplings)

    def draw(self) -> torch.Tensor:
        """Draws a token for each slot, records those of answers that have not ended, and returns the ids."""
        ids, logprobs = draw(self.logits, self._seed, self._drawn, self._sampling, self._kind)
        self._drawn = self._drawn + 1
        for slot, token, logprob in zip(self.slots, ids.tolist(), logprobs.tolist(), strict=True):
            if not slot.has_ended:
                slot.write(token, logprob)
        return ids

    def outcomes(self, version: int) -> list[Outcome]:
        """Answers that have ended since the last time, and tokens of jobs with a listener. Cancelled jobs end here."""
        found: list[Outcome] = []
        for slot in self.slots:
            job = slot.job
            if slot.has_ended:
                found += [] if slot.is_delivered else [(job, job.ended(slot.ids, slot.logprobs, version))]
                slot.is_delivered = True
            elif job.is_cancelled:
                slot.has_ended = slot.is_delivered = True
            elif job.has_listener:
                found.append((job, list(slot.ids)))
        return found

    def select(self, rows: list[int]) -> SlotBatch:
        """The given slots only."""
        layers = [SlotLayer(layer.keys[rows], layer.values[rows]) for layer in self.layers]
        return SlotBatch([self.slots[row] for row in rows], self.length[rows], self.logits[rows], layers)

    def join(self, other: SlotBatch) -> SlotBatch:
        """Both sets of slots, in order."""
        layers = []
        for pair in zip(self.layers, other.layers, strict=True):
            columns = max(layer.keys.shape[2] for layer in pair)
            keys = torch.cat([widen(layer.keys, columns) for layer in pair])
            layers.append(SlotLayer(keys, torch.cat([widen(layer.values, columns) for layer in pair])))
        length, logits = torch.cat([self.length, other.length]), torch.cat([self.logits, other.logits])
        return SlotBatch(self.slots + other.slots, length, logits, layers)

    def next_cache(self) -> Cache:
        """The cache for one more token per slot, grown if need be."""
        used = int(self.length.max()) + 1
        for layer in self.layers:
            if layer.keys.shape[2] < used:
                columns = used + min(GROWTH, self._longest)
                layer.keys, layer.values = widen(layer.keys, columns), widen(layer.values, columns)
            layer.used, layer.write_columns = used, self.length
        return Cache(layers=list(self.layers))

    def mask(self) -> torch.Tensor:
        """bool `[slots, 1, 1, columns in use]`: which keys the next token may look at, itself included."""
        columns = torch.arange(int(self.length.max()) + 1, device=self.length.device)
        return (columns <= self.length[:, None])[:, None, None, :]


def widen(tensor: torch.Tensor, columns: int) -> torch.Tensor:
    """The same keys or values with room for `columns`. New columns are masked, yet NaN in them would come through."""
    return pad(tensor, (0, 0, 0, columns - tensor.shape[2]))


class PlainDecoder:
    """Decoding as torch runs it, without captured graphs. At most `concurrency` rollouts are written at the same time;
    finished ones leave the batch and waiting ones take their place. `version` returns the version of the weights.

    A prefix group goes through the model once and its keys and values are copied to the group's slots.
    """

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
        batch: SlotBatch | None = None
        for step in count(1):
            waiting.extend(arrivals.take())
            batch = self._admit(batch, waiting)
            if batch is None:
                return
            ids = batch.draw()
            num_ended = sum(slot.has_ended for slot in batch.slots)
            is_leaving = num_ended >= max(1, LEAVE_SHARE * len(batch.slots))
            if is_leaving or step % STEPS_PER_TURN == 0:
                yield batch.outcomes(self._version())
            if is_leaving:
                staying = [row for row, slot in enumerate(batch.slots) if not slot.has_ended]
                batch, ids = (batch.select(staying) if staying else None), ids[staying]
            if batch is not None:
                self._advance(batch, ids)

    def _admit(self, batch: SlotBatch | None, waiting: deque[Job]) -> SlotBatch | None:
        """Waiting groups join as soon as there are slots for all their rollouts; a huge one joins alone."""
        free = self._concurrency - (0 if batch is None else len(batch.slots))
        joining: list[list[Job]] = []
        while waiting:
            group = _first_group(waiting)
            if len(group) > free and (batch is not None or joining):
                break
            for _ in group:
                waiting.popleft()
            if wanted := [job for job in group if not job.is_cancelled]:
                joining.append(wanted)
                free -= len(wanted)
        if not joining:
            return batch
        new = self._prefill(joining)
        return new if batch is None else batch.join(new)

    def _prefill(self, groups: list[list[Job]]) -> SlotBatch:
        """Each group's tokens once through the model, padded on the right, where the causal mask hides the padding."""
        prompts = [torch.tensor(group[0].request.token_ids, device=self._device) for group in groups]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        table = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        cache: Any = DynamicCache()
        positions = torch.arange(table.shape[1], device=self._device).expand_as(table)
        hidden = self.hidden(table, positions, None, cache)
        logits = self.logits(hidden[torch.arange(len(table), device=self._device), lengths - 1])
        slots = [Slot(job) for group in groups for job in group]
        for slot in slots:
            slot.job.first_version = self._version()
        rows = [row for row, group in enumerate(groups) for _ in group]
        layers = [SlotLayer(layer.keys[rows], layer.values[rows]) for layer in cache.layers]
        return SlotBatch(slots, lengths[rows], logits[rows], layers)

    def _advance(self, batch: SlotBatch, ids: torch.Tensor) -> None:
        """One decode step: the tokens just drawn go through the model."""
        hidden = self.hidden(ids[:, None], batch.length[:, None], batch.mask(), batch.next_cache())
        batch.logits = self.logits(hidden[:, -1])
        is_open = torch.tensor([not slot.has_ended for slot in batch.slots], device=self._device)
        batch.length = batch.length + is_open  # a slot that has ended overwrites its last column

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
    if first.prefix_group is None:
        return [waiting[0]]
    shared = first.prefix_group, first.token_ids
    return list(takewhile(lambda job: (job.request.prefix_group, job.request.token_ids) == shared, waiting))
