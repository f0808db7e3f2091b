"""The reference engine: samples from the trainer's own weights, in the trainer's process.

In: requests. Out: one answer a request, each as soon as it is whole; in their order, but for CUDA graphs. The prompt of
a group goes through the model once and its keys and values are shared by the group's slots; finished rollouts leave
the batch and waiting ones take their place. Under LoRA the sampled weights are a scratch copy, rebuilt as base +
scale·B·A at each load: sampling through adapter layers is slower, and merging in place would drift.

On CUDA the decode step is replayed as a CUDA graph (`_cuda/continuous.py`), in the precision in which the trainer
computes: under bfloat16 the linear layers are copies in bfloat16, and an adapter stays beside them. With a snapshot of
the weights it can write while the trainer trains, on a stream of its own. The plain path below is for CPUs, where
large layers are packed (`_packed.py`), and for models that the other cannot run.
"""

import asyncio
import math
import warnings
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Annotated

import torch
from pydantic import Field
from torch.utils._triton import has_triton
from transformers import DynamicCache
from transformers.cache_utils import Cache

from podium.engine._cuda.adapted import AdaptedLinear
from podium.engine._cuda.continuous import Continuous
from podium.engine._cuda.joined import join_weights
from podium.engine._cuda.replayed_score import ReplayedScore
from podium.engine._draft import Draft
from podium.engine._evidence import Halves, held_adapter, held_full, merged
from podium.engine._packed import PackedLinear, pack_layers
from podium.engine._room import check_room
from podium.engine._sampling import draw
from podium.engine._slots import SlotLayer, Slots
from podium.engine._small_trial import captured_gap, refuse_gap, refusing_to_decode, small_gap, small_policy
from podium.errors import InputError
from podium.model.device_thread import SHARED, beside_the_trainer
from podium.model.evidence import Held
from podium.model.forward import decoder_states, head_weight, sequence_logprobs, softcap
from podium.model.handoff import read_published
from podium.model.load import Policy
from podium.model.logprobs import capped, logits_of
from podium.model.products import ExactLinear, is_plain_linear
from podium.model.self_check import SMALL_TOLERANCE, tolerance
from podium.records import Answer, Request, Sampling

DECODING_MARGIN = 2.0
"""The probe has few tokens, so their mean may be further off than that of the check at load."""
PROBE, PROBE_SAMPLING = Request(0, tuple(range(1, 6)), (1, 2)), Sampling(max_new_tokens=4)
"""What is decoded to compare with a plain forward pass."""
LEAVE_SHARE = 0.25
"""Finished slots leave once they are this share of the batch: leaving copies the cache."""
SCORED_AT_ONCE = 256
"""Tokens of a text, so that not all logits of a long one exist at the same time."""
STEPS_A_TURN = 8
"""Tokens of a batch after which another call may have the device."""


class Inprocess:
    """`snapshot`: sample from a copy of the trained weights, for schedules that train between two syncs.

    `compute_dtype` is that of the trainer's matrix products where it is not the weights', `overlaps` asks for a thread
    and a stream beside the trainer's, for an engine with a snapshot; both count on CUDA only.
    """

    channels = ("shared", "adapter", "disk")

    def __init__(
        self,
        policy: Policy,
        snapshot: bool = False,
        compute_dtype: torch.dtype | None = None,
        overlaps: bool = False,
        *,
        concurrency: Annotated[int, Field(ge=1, description="rollouts written at the same time")] = 512,
    ) -> None:
        self.policy_version: int | None = None
        is_half = policy.model.dtype != torch.float32
        if is_half and policy.peft is not None and snapshot:
            raise InputError(
                "run.sync_every must be 1 and run.max_lag 0 with model.dtype = 'bfloat16': a snapshot would round the "
                "adapter"
            )
        # A merged bfloat16 weight would round small updates away: there the adapter's own layers sample.
        self._model = policy.model if is_half and policy.peft is not None else policy.twin
        self._trained = policy.model
        self._expected = policy.named_weights
        self._device = policy.device
        self._compute_dtype = compute_dtype if policy.device.type == "cuda" and not is_half else None
        self._allowed_gap = DECODING_MARGIN * tolerance(self._model, self._compute_dtype or self._model.dtype)
        """Of the probe's logprobs, on average, from those of a plain forward pass. Measured here, while the layers are
        still the model's own."""
        self._concurrency = concurrency
        self._max_context_tokens = policy.max_context_tokens
        self._scale = policy.adapter_scale if policy.peft is not None else 0.0
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
        ranks = {name.rpartition(".lora_")[0]: len(a) for name, a in policy.named_weights() if name.endswith(".lora_A")}
        self._adapted = list(ranks)
        if self._compute_dtype is not None:
            self._halve(ranks)
        elif self._model is not self._trained:
            self._packed = pack_layers(self._model)
            for layer in ranks:
                module = self._model.get_submodule(layer)
                self._base[layer] = module.weight.detach()  # type: ignore[union-attr]
                if not isinstance(module, PackedLinear):
                    module.weight = _frozen(self._base[layer].clone())
        self._small = small_policy(policy)
        self._check_decoding()
        is_apart = overlaps and snapshot and self._device.type == "cuda"
        self._thread = beside_the_trainer(self._device) if is_apart else SHARED
        self._continuous: Continuous | None = None
        self._is_compared = False
        """Whether captured decoding has been compared with a plain forward pass; done at the first call."""
        self._is_replaying = False
        """Whether a call is on the captured steps; one beside it decodes plainly."""
        if self._device.type == "cuda":
            self._continuous = self._captured_decoding()
        self._replayed_score = ReplayedScore(self._model, self._compute_dtype)

    def _halve(self, ranks: dict[str, int]) -> None:
        """Linear layers in the trainer's precision, adapters beside them: what its autocast makes of them."""
        head = self._model.get_output_embeddings()
        linears = [(n, m) for n, m in self._model.named_modules() if is_plain_linear(m) and m is not head]
        for _, module in linears:
            for name, parameter in module.named_parameters(recurse=False):
                if name == "weight" or not isinstance(module, ExactLinear):  # whose bias joins sums in float32
                    setattr(module, name, _frozen(parameter.detach().to(self._compute_dtype)))
        for name, module in linears:
            if name in ranks:
                self._model.set_submodule(name, AdaptedLinear(module, ranks[name], self._scale))
        join_weights(self._model)

    def _captured_decoding(self) -> Continuous | None:
        """None, and a warning, where it cannot be."""
        if self._model is self._trained:
            return _warn_of_plain_decoding(
                "model.dtype = 'bfloat16' samples through the adapter's own layers; with model.dtype = 'float32' and "
                "trainer.precision = 'bfloat16' it would not"
            )
        if not has_triton():
            return _warn_of_plain_decoding("Triton is not installed or does not know this GPU")
        return Continuous(self._model, self._concurrency, self._compute_dtype)

    def _check_decoding(self) -> None:
        """The cached, slot-by-slot decode gives the logprobs of a plain forward pass; asked once, and of the small copy
        of the model, whose windows are short, too."""
        with refusing_to_decode():
            [answer] = chain.from_iterable(self._generate(deque([PROBE]), PROBE_SAMPLING))
            refuse_gap(self._gap(answer), self._allowed_gap)
            if self._small is not None:
                decode = Inprocess(self._small)._generate
                refuse_gap(small_gap(lambda asked, how: decode(deque(asked), how), self._small), SMALL_TOLERANCE)

    def _compare(self, requests: Sequence[Request], sampling: Sampling) -> None:
        """Captured decoding, with room for these requests, gives a plain forward pass's logprobs; else it is off."""
        self._is_compared = True
        assert self._continuous is not None
        try:
            self._continuous.reserve(requests, sampling)
            [[answer]] = self._continuous.generate([PROBE], PROBE_SAMPLING, lambda: 0)
            gap = self._gap(answer)
            if self._small is not None:
                refuse_gap(captured_gap(self._small, self._concurrency), SMALL_TOLERANCE)
        except Exception as error:  # whatever a compiler, a kernel or another architecture's modules raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self._continuous = _warn_of_plain_decoding(f"{type(error).__name__}: {reason}")
            return
        if not gap <= self._allowed_gap:
            self._continuous = _warn_of_plain_decoding(f"its logprobs differ by {gap:.3g} from a plain forward pass's")

    def _gap(self, answer: Answer) -> float:
        """Mean difference between the probe's logprobs and those of a plain forward pass."""
        gaps = []
        for ids, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            expected = self._score([*PROBE.token_ids, *ids])[len(PROBE.token_ids) - 1 :]
            gaps += [abs(a - b) for a, b in zip(logprobs, expected, strict=True)]
        return fmean(gaps) if all(map(math.isfinite, gaps)) else math.inf

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        check_room(requests, sampling, self._max_context_tokens)
        if self._continuous is not None and requests and not self._is_compared:
            await self._thread.run(self._compare, requests, sampling)
        if self._continuous is None or self._is_replaying:  # captured steps write to one set of slots
            answers = self._generate(deque(requests), sampling)
            while (some := await self._thread.run(next, answers, None)) is not None:
                for answer in some:
                    yield answer
            return
        self._is_replaying = True
        try:
            made = self._continuous.generate(requests, sampling, lambda: self.policy_version or 0)
            async with aclosing(self._thread.made_ahead(made)) as batches:
                async for some in batches:
                    for answer in some:
                        yield answer
        finally:
            self._is_replaying = False

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        can_replay = self._continuous is not None and self._is_compared
        return await self._thread.run(self._replayed_score if can_replay else self._score, list(token_ids))

    @torch.no_grad()
    def _score(self, token_ids: list[int]) -> list[float]:
        """Through the head that samples: where it is packed, that one."""
        if not isinstance(self._model.get_output_embeddings(), PackedLinear):
            return sequence_logprobs(self._model, token_ids, compute_dtype=self._compute_dtype)
        ids = torch.tensor(token_ids)
        states = self._hidden(ids[None], torch.arange(len(ids))[None], None, DynamicCache())[0, :-1]
        found: list[float] = []
        for some, targets in zip(states.split(SCORED_AT_ONCE), ids[1:].split(SCORED_AT_ONCE), strict=True):
            found += self._logits(some).log_softmax(-1).gather(-1, targets[:, None])[:, 0].tolist()
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
        faults = self._continuous.faults() if self._continuous is not None else []
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
            if layer and self._model is self._trained:
                continue
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
        if self._continuous is not None:
            self._continuous.take_weights()

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

    @torch.inference_mode()
    def _generate(self, waiting: deque[Request], sampling: Sampling) -> Iterator[list[Answer]]:
        """Answers as they become whole, and nothing now and then, so that others get their turn on the device."""
        requests = list(waiting)
        drafts: list[Draft] = []
        stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=self._device)
        answered = steps = 0
        slots: Slots | None = None
        while waiting or slots is not None:
            slots = self._admit(slots, waiting, requests, sampling)
            joined = requests[len(drafts) : len(requests) - len(waiting)]
            drafts += [Draft(request, self.policy_version or 0) for request in joined]
            ids, logprobs = draw(slots.logits, slots.seed, slots.drawn, sampling)
            slots.record(ids, logprobs, stop_ids)
            slots, ids = _leave(slots, ids, drafts, stop_ids, self.policy_version or 0)
            whole = []
            while answered < len(drafts) and drafts[answered].is_whole:
                whole.append(drafts[answered].answer())
                answered += 1
            if whole or (steps := steps + 1) % STEPS_A_TURN == 0:
                yield whole
            if slots is not None:
                self._advance(slots, ids)

    def _admit(
        self, slots: Slots | None, waiting: deque[Request], requests: list[Request], sampling: Sampling
    ) -> Slots:
        """Waiting requests join as soon as there are slots for all their rollouts; a huge one joins alone."""
        free = self._concurrency - (0 if slots is None else len(slots))
        joining: list[int] = []
        while waiting and (len(waiting[0].seeds) <= free or (slots is None and not joining)):
            joining.append(len(requests) - len(waiting))
            free -= len(waiting.popleft().seeds)
        if not joining:
            assert slots is not None
            return slots
        new = self._prefill(joining, requests, sampling.max_new_tokens)
        return new if slots is None else slots.join(new)

    def _prefill(self, joining: list[int], requests: list[Request], max_new_tokens: int) -> Slots:
        """Each prompt once through the model, padded on the right, where the causal mask hides it."""
        prompts = [torch.tensor(requests[index].token_ids, device=self._device) for index in joining]
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        table = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
        cache = DynamicCache()
        positions = torch.arange(table.shape[1], device=self._device).expand_as(table)
        hidden = self._hidden(table, positions, None, cache)
        logits = self._logits(hidden[torch.arange(len(table), device=self._device), lengths - 1])
        places = [(row, k) for row, index in enumerate(joining) for k in range(len(requests[index].seeds))]
        rows, samples = torch.tensor(places, device=self._device).t()
        seeds = [seed for index in joining for seed in requests[index].seeds]
        room = (len(rows), max_new_tokens)
        return Slots(
            request=torch.tensor(joining, device=self._device)[rows],
            sample=samples,
            seed=torch.tensor(seeds, device=self._device),
            length=lengths[rows],
            drawn=torch.zeros_like(rows),
            finished=torch.zeros_like(rows, dtype=torch.bool),
            logits=logits[rows],
            ids=torch.zeros(room, dtype=torch.long, device=self._device),
            logprobs=torch.zeros(room, device=self._device),
            layers=[SlotLayer(layer.keys[rows], layer.values[rows]) for layer in cache.layers],  # type: ignore[index]
        )

    def _advance(self, slots: Slots, ids: torch.Tensor) -> None:
        """One decode step: the tokens just drawn go through the model."""
        hidden = self._hidden(ids[:, None], slots.length[:, None], slots.mask(), slots.next_cache())
        slots.logits = self._logits(hidden[:, -1])
        slots.length = slots.length + ~slots.finished  # one that has ended writes over its last column

    def _hidden(
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

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        dtype = self._compute_dtype or hidden.dtype
        head = self._model.get_output_embeddings()
        if isinstance(head, PackedLinear):
            return capped(head(hidden), softcap(self._model))
        return logits_of(hidden.to(dtype), head_weight(self._model).to(dtype), softcap(self._model))


def _leave(
    slots: Slots, ids: torch.Tensor, drafts: list[Draft], stop_ids: torch.Tensor, version: int
) -> tuple[Slots | None, torch.Tensor]:
    """Takes the finished slots out once they are a good share of the batch, and writes them to their drafts."""
    num_finished = int(slots.finished.sum())
    if num_finished < max(1, LEAVE_SHARE * len(slots)):
        return slots, ids
    done = slots.finished.nonzero()[:, 0]
    counts = slots.drawn[done].tolist()
    stopped = torch.isin(slots.ids[done, slots.drawn[done] - 1], stop_ids).tolist()
    owners = zip(slots.request[done].tolist(), slots.sample[done].tolist(), strict=True)
    rows = zip(owners, counts, stopped, slots.ids[done].tolist(), slots.logprobs[done].tolist(), strict=True)
    for (request, sample), count, stop, row_ids, row_logprobs in rows:
        drafts[request].add(sample, row_ids[:count], row_logprobs[:count], "stop" if stop else "length", version)
    if num_finished == len(slots):
        return None, ids
    staying = (~slots.finished).nonzero()[:, 0]
    return slots.select(staying), ids[staying]


def _warn_of_plain_decoding(reason: str) -> None:
    warnings.warn(f"rollouts are written without CUDA graphs, several times slower: {reason}", stacklevel=2)


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
