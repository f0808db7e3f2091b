"""The reference engine: samples from the trainer's own weights, in the trainer's process.

One request per call, any number of calls at the same time; a decoder batches whatever is outstanding. Weights in
bfloat16 exist once: the engine reads the trainer's base, and a push fills its own buffers for the adapter, which is a
separate product. Under LoRA in float32 the sampled weights are a scratch copy, rebuilt as base + scale·B·A at each
load: sampling through adapter layers is slower, and merging in place would drift.

On CUDA the decode step is replayed as a CUDA graph (`cuda/captured.py`), in the precision in which the trainer
computes: for bfloat16 products over float32 weights the linear layers are copies in bfloat16. With a snapshot of the
weights the engine can write while the trainer trains, on a stream of its own. Plain decoding (`decoding/plain.py`) is
for CPUs, where large layers are packed, and for models that cannot be captured.
"""

import asyncio
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.utils._triton import has_triton
from transformers import DynamicCache, PreTrainedModel

from podium.engine.cuda.captured import CapturedDecoder
from podium.engine.cuda.joined import AdaptedLinear, join_weights
from podium.engine.cuda.replayed_score import ReplayedScore
from podium.engine.decoding.plain import PackedLinear, PlainDecoder, pack_layers
from podium.engine.decoding.queue import Arrivals, Decoder, Outcome, RequestQueue, check_room, decode_now
from podium.engine.decoding.trial import captured_gap, refuse_gap, refusing_to_decode, small_gap, small_policy
from podium.model.device_thread import SHARED, beside_the_trainer
from podium.model.evidence import Held, Shown, branch_input, branch_views, named_trained, shown
from podium.model.forward import ExactLinear, is_plain_linear, sequence_logprobs
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
Halves = tuple[torch.Tensor, torch.Tensor]
"""A and B of one adapted layer."""


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
        is_half = policy.model.dtype != torch.float32
        self._model = policy.twin
        self._expected = policy.named_weights
        self._device = policy.device
        self._compute_dtype = compute_dtype if policy.device.type == "cuda" else None
        if is_half:
            self._compute_dtype = policy.model.dtype
        self._allowed_gap = DECODING_MARGIN * tolerance(self._model, self._compute_dtype or self._model.dtype)
        """Of the probe's logprobs, on average, from those of a plain forward pass. Measured here, while the layers are
        still the model's own."""
        computes_in = self._compute_dtype or policy.model.dtype
        self.traits = replace(
            type(self).traits,
            dtype=str(computes_in).removeprefix("torch."),
            keeps_order=policy.device.type == "cpu",
        )
        self._concurrency, self._cache_bytes = concurrency, cache_bytes
        self._max_context_tokens = policy.max_context_tokens
        self._scale = policy.adapter_scale
        self._base: dict[str, torch.Tensor] = {}
        """Under LoRA: the untouched weights of the adapted layers."""
        self._laid: dict[str, Halves] = {}
        """The adapter that was last added to each of these layers."""
        self._packed: list[PackedLinear] = []
        if snapshot and policy.peft is None:
            for module in self._model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(module, name, _frozen(parameter.detach().clone()))
            self._model.tie_weights()
        ranks = {
            name.rpartition(".lora_")[0]: getattr(a, "ds_shape", a.shape)[0]  # ZeRO-3 leaves a placeholder of size 0
            for name, a in named_trained(policy.model)
            if name.endswith(".lora_A")
        }
        self._adapted = list(ranks)
        if self._compute_dtype is not None:
            self._halve(ranks)
        else:
            self._packed = pack_layers(self._model)
            for layer in ranks:
                module = self._model.get_submodule(layer)
                self._base[layer] = module.weight.detach()  # type: ignore[union-attr]
                if not isinstance(module, PackedLinear):
                    module.weight = _frozen(self._base[layer].clone())
        self._plain = PlainDecoder(self._model, self._compute_dtype, concurrency, self._version)
        self._small = small_policy(policy)
        self._check_decoding()
        is_apart = overlaps and snapshot and self._device.type == "cuda"
        self._thread = beside_the_trainer(self._device) if is_apart else SHARED
        self._captured: CapturedDecoder | None = None
        self._is_compared = False
        """Whether captured decoding has been compared with a plain forward pass; done at the first request."""
        if self._device.type == "cuda":
            self._captured = self._captured_decoding()
        self._replayed_score = ReplayedScore(self._model, self._compute_dtype)
        self._queue = RequestQueue(self._thread, self._decode)

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

    def _captured_decoding(self) -> CapturedDecoder | None:
        """None, and a warning, where it cannot be."""
        if not has_triton():
            return _warn_of_plain_decoding("Triton is not installed or does not know this GPU")
        return CapturedDecoder(self._model, self._concurrency, self._compute_dtype, self._version, self._cache_bytes)

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
                refuse_gap(captured_gap(self._small, self._concurrency), SMALL_TOLERANCE)
        except Exception as error:  # whatever a compiler, a kernel or another architecture's modules raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._captured = _warn_of_plain_decoding(f"{type(error).__name__}: {reason}")
            return
        if not gap <= self._allowed_gap:
            self._captured = _warn_of_plain_decoding(f"its logprobs differ by {gap:.3g} from a plain forward pass's")

    def _gap(self, decoder: Decoder) -> float:
        """Mean difference between the probe's logprobs and those of a plain forward pass."""
        gaps = []
        for request, answer in zip(PROBE, decode_now(decoder, PROBE), strict=True):
            expected = self._score([*request.token_ids, *answer.token_ids])[len(request.token_ids) - 1 :]
            gaps += [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)]
        return fmean(gaps) if all(map(math.isfinite, gaps)) else math.inf

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

    def _held(self) -> Held:
        faults = self._captured.faults() if self._captured is not None else []
        if not self._adapted:
            return held_full(self._model, faults)
        return held_adapter(self._model, self._adapted, self._base, self._laid, self._scale, faults)

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
        """Full weights are copied unless they are the same memory; an adapter is laid over the base."""
        halves: dict[str, torch.Tensor] = {}
        own = dict(self._model.named_parameters())
        is_full = False
        for name, tensor in weights:
            layer, _, part = name.rpartition(".lora_")
            if layer:
                halves[part[0]] = tensor.to(self._device)  # from a folder it comes on the CPU
                if len(halves) == 2:
                    self._lay_over(layer, halves.pop("A"), halves.pop("B"))
                continue
            is_full = True
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        for packed in self._packed if is_full else []:
            packed.pack(packed.weight)
        if self._captured is not None:
            self._captured.take_weights()

    def _lay_over(self, layer: str, a: torch.Tensor, b: torch.Tensor) -> None:
        module = self._model.get_submodule(layer)
        if isinstance(module, AdaptedLinear):
            module.load(a, b)
            return
        weight = merged(self._base[layer], a, b, self._scale)
        if isinstance(module, PackedLinear):
            module.pack(weight)
        else:
            module.weight.copy_(weight)  # type: ignore[union-attr]
        self._laid[layer] = a.clone(), b.clone()


def _warn_of_plain_decoding(reason: str) -> None:
    warnings.warn(f"rollouts are written without CUDA graphs, several times slower: {reason}", stacklevel=2)


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


# ---- what the engine shows of its weights (model/evidence.py), read from the layers that it samples with


@torch.no_grad()
def held_full(model: PreTrainedModel, faults: Iterable[str] = ()) -> Held:
    """Every parameter; where a layer multiplies with a packed copy, that copy is compared with its parameter."""
    stale = [
        f"{name} multiplies with a packed copy of other weights"
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and not torch.equal(module.unpacked(), module.weight)
    ]
    return Held({name: shown(tensor) for name, tensor in model.named_parameters()}, faults=(*faults, *stale))


@torch.no_grad()
def held_adapter(
    model: PreTrainedModel,
    layers: Iterable[str],
    base: Mapping[str, torch.Tensor],
    laid: Mapping[str, Halves],
    scale: float,
    faults: Iterable[str] = (),
) -> Held:
    """The halves that each layer was given, and its branch; `base` and `laid` are of layers that merge them.

    A merged layer has no branch. It is computed once more as base + scale·B·A, which gives the same bits.
    """
    tensors: dict[str, Shown] = {}
    scales: dict[str, float] = {}
    branches: dict[str, torch.Tensor] = {}
    found = list(faults)
    for layer in layers:
        module: Any = model.get_submodule(layer)
        if isinstance(module, AdaptedLinear):
            a, b, scales[layer] = module.a, module.b, module.scale
            branches[layer] = module.branch(branch_input(a.shape[1], a.device, a.dtype))[0]
        elif layer not in laid:
            found.append(f"no adapter was applied to {layer}")
            continue
        else:
            (a, b), scales[layer] = laid[layer], scale
            if not torch.equal(_weight(module), merged(base[layer], a, b, scale)):
                found.append(f"{layer} does not equal its base weights plus the adapter")
        tensors |= {f"{layer}.lora_A": shown(a), f"{layer}.lora_B": shown(b)}
    views = torch.stack([branch_views(output) for output in branches.values()]).tolist() if branches else []
    return Held(tensors, scales, dict(zip(branches, views, strict=True)), faults=tuple(found))


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """base + scale·B·A"""
    return torch.addmm(base.to(a.dtype), b, a, alpha=scale)


def _weight(module: Any) -> torch.Tensor:
    """What the layer really multiplies with."""
    return module.unpacked() if isinstance(module, PackedLinear) else module.weight
