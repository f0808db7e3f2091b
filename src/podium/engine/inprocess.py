"""The reference engine: samples from the trainer's own weights, in the trainer's process.

In: requests. Out: one answer a request, in their order, each as soon as it is whole. The prompt of a group goes
through the model once and its keys and values are shared out to the group's slots; finished rollouts leave the batch
and waiting groups take their place. Under LoRA the sampled weights are a scratch copy, rebuilt as base + scale·B·A
at each load: sampling through adapter layers is slower, and merging in place would drift.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field
from transformers import DynamicCache

from podium.engine._draft import Draft
from podium.engine._room import check_room
from podium.engine._sampling import draw
from podium.engine._slots import SlotLayer, Slots
from podium.errors import InputError
from podium.model.device_thread import on_device_thread
from podium.model.forward import head_weight, sequence_logprobs, softcap
from podium.model.handoff import read_published
from podium.model.load import Policy
from podium.model.logprobs import logits_of
from podium.model.self_check import TOLERANCE
from podium.records import Answer, Request, Sampling

LEAVE_SHARE = 0.25
"""Finished slots leave once they are this share of the batch: leaving copies the cache."""


class Inprocess:
    """`snapshot`: sample from a copy of the trained weights, for schedules that train between two syncs."""

    channels = ("shared", "adapter", "disk")

    def __init__(
        self,
        policy: Policy,
        snapshot: bool = False,
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
        self._concurrency = concurrency
        self._max_context_tokens = policy.max_context_tokens
        self._scale = policy.adapter_scale if policy.peft is not None else 0.0
        self._base: dict[str, torch.Tensor] = {}
        """Under LoRA: the untouched weights of the adapted layers."""
        if snapshot and policy.peft is None:
            for module in self._model.modules():
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(module, name, _frozen(parameter.detach().clone()))
            self._model.tie_weights()
        self._check_decoding()

    def _check_decoding(self) -> None:
        """The cached, slot-by-slot decode gives the logprobs of a plain forward pass; asked once."""
        prompt = tuple(range(1, 6))
        request = Request(0, prompt, (1, 2))
        [answer] = self._generate(deque([request]), Sampling(max_new_tokens=4))
        for ids, logprobs in zip(answer.token_ids, answer.logprobs, strict=True):
            expected = sequence_logprobs(self._model, [*prompt, *ids])[len(prompt) - 1 :]
            gap = max(abs(a - b) for a, b in zip(logprobs, expected, strict=True))
            if not gap <= TOLERANCE[self._model.dtype]:
                raise InputError(
                    f"engine.name = 'inprocess' cannot decode this architecture: logprobs differ by {gap:.3g} from "
                    "those of a plain forward pass; use another model"
                )

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        check_room(requests, sampling, self._max_context_tokens)
        answers = self._generate(deque(requests), sampling)
        while (answer := await on_device_thread(next, answers, None)) is not None:
            yield answer

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await on_device_thread(sequence_logprobs, self._model, list(token_ids))

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        await on_device_thread(self._load_weights, weights)
        self.policy_version = version

    async def load_folder(self, folder: Path, version: int) -> None:
        weights = await asyncio.to_thread(read_published, folder, dict(self._expected()), version)
        await self.load_weights(weights.items(), version)

    def close(self) -> None:
        """Nothing is held that does not go with the object."""

    @torch.no_grad()
    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Full weights are copied unless they are the same memory; an adapter is laid over the base."""
        halves: dict[str, torch.Tensor] = {}
        own = dict(self._model.named_parameters())
        for name, tensor in weights:
            layer, _, part = name.rpartition(".lora_")
            if layer and self._model is self._trained:
                continue
            if layer:
                halves[part[0]] = tensor
                if len(halves) == 2:
                    self._lay_over(layer, halves.pop("A"), halves.pop("B"))
            elif own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)

    def _lay_over(self, layer: str, a: torch.Tensor, b: torch.Tensor) -> None:
        module = self._model.get_submodule(layer)
        if layer not in self._base:
            self._base[layer] = module.weight.detach()  # type: ignore[union-attr]
            module.weight = _frozen(torch.empty_like(self._base[layer]))
        base = self._base[layer]
        module.weight.copy_(torch.addmm(base.to(a.dtype), b, a, alpha=self._scale))  # type: ignore[union-attr]

    @torch.inference_mode()
    def _generate(self, waiting: deque[Request], sampling: Sampling) -> Iterator[Answer]:
        requests = list(waiting)
        drafts: list[Draft] = []
        stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.long, device=self._device)
        answered = 0
        slots: Slots | None = None
        while waiting or slots is not None:
            slots = self._admit(slots, waiting, requests, sampling)
            joined = requests[len(drafts) : len(requests) - len(waiting)]
            drafts += [Draft(request, self.policy_version or 0) for request in joined]
            ids, logprobs = draw(slots.logits, slots.seed, slots.drawn, sampling)
            slots.record(ids, logprobs, stop_ids)
            slots, ids = _leave(slots, ids, drafts, stop_ids, self.policy_version or 0)
            while answered < len(drafts) and drafts[answered].is_whole:
                yield drafts[answered].answer()
                answered += 1
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
        hidden = self._model.get_decoder()(
            input_ids=table,
            position_ids=torch.arange(table.shape[1], device=self._device).expand_as(table),
            attention_mask=None,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
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
        hidden = self._model.get_decoder()(
            input_ids=ids[:, None],
            position_ids=slots.length[:, None],
            attention_mask=slots.mask(),
            past_key_values=slots.next_cache(),
            use_cache=True,
        ).last_hidden_state
        slots.logits = self._logits(hidden[:, -1])
        slots.length = slots.length + ~slots.finished  # one that has ended writes over its last column

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(hidden, head_weight(self._model), softcap(self._model))


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


def _frozen(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)
