"""Continuous batching over slots: prompts join, rollouts are decoded together, those that ended leave.

In: requests. Out: answers as they become whole, in any order, some at a time. The host runs ahead of the device: it
queues a few steps, and only then looks at which rollouts had ended some steps before. So a rollout that ended is
decoded for a few steps more, to no effect, and the device never waits for the host.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from podium.engine._cuda.decode_step import Capacity, DecodeStep
from podium.engine._cuda.roster import Roster, Seat, ladder, rung_for
from podium.engine._draft import Draft
from podium.model.forward import decoder_states, head_weight
from podium.model.memory import cache_elements_per_token, device_bytes
from podium.model.row import Segments
from podium.model.transfer import to_device
from podium.records import Answer, Request, Sampling

STEPS_AHEAD = 4
"""Decode steps between two looks at what has ended."""
MOST_PROMPT_TOKENS = 1 << 15
"""Of prompts that go through the model together."""


@dataclass
class Copy:
    """Tensors on their way to the host, and the event after which they are there."""

    seats: list[Seat]
    tensors: list[torch.Tensor]
    version: int
    """Of the weights when they set out."""
    event: Any = None

    @classmethod
    def of(cls, seats: list[Seat], *tensors: torch.Tensor, version: int = 0) -> "Copy":
        if not tensors[0].is_cuda:
            return cls(seats, [tensor.clone() for tensor in tensors], version)
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
        event = torch.cuda.Event()
        event.record()
        return cls(seats, hosts, version, event)

    @property
    def is_there(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> list[torch.Tensor]:
        if self.event is not None:
            self.event.synchronize()
        return self.tensors


@dataclass(frozen=True)
class PackedPrompts:
    """Prompts one after the other; L tokens, N prompts."""

    token_ids: torch.Tensor
    """int64 `[L]`"""
    position_ids: torch.Tensor
    """int64 `[L]`, the column in its prompt's place."""
    places: torch.Tensor
    """int64 `[L]`, the place of the prompt that a token belongs to."""
    last_tokens: torch.Tensor
    """int64 `[N]`"""
    last_places: torch.Tensor
    """int64 `[N]`"""
    segments: Segments

    @classmethod
    def of(cls, prompts: Sequence[tuple[int, Sequence[int]]]) -> "PackedPrompts":
        """From (place, ids) of each prompt."""
        lengths = np.array([len(ids) for _, ids in prompts])
        places = np.array([place for place, _ in prompts])
        ends = lengths.cumsum()
        return cls(
            token_ids=torch.tensor([i for _, ids in prompts for i in ids]),
            position_ids=torch.from_numpy(np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)),
            places=torch.from_numpy(np.repeat(places, lengths)),
            last_tokens=torch.from_numpy(ends - 1),
            last_places=torch.from_numpy(places),
            segments=Segments.of(lengths, lengths, None),
        )


class Continuous:
    """`model` computes prompts; a twin of it, made at the first call, decodes."""

    def __init__(self, model: PreTrainedModel, concurrency: int, compute_dtype: torch.dtype | None) -> None:
        self._model, self._concurrency, self._compute_dtype = model, concurrency, compute_dtype
        self._device = model.device
        self._step: DecodeStep | None = None

    def reserve(self, requests: Sequence[Request], sampling: Sampling) -> DecodeStep:
        """Room for these requests; what was there before is given up if it is too small."""
        wanted = self._capacity_for(requests, sampling)
        if self._step is not None:
            wanted = wanted.with_room_for(self._step.capacity)
        if self._step is None or wanted != self._step.capacity:
            self._step = None  # its memory first
            self._step = DecodeStep(self._model, wanted, self._compute_dtype)
        return self._step

    @cached_property
    def _elements_per_token(self) -> int:
        return cache_elements_per_token(self._model, self._compute_dtype)

    def take_weights(self) -> None:
        """After new ones were laid into the model: what the steps keep a copy of."""
        if self._step is not None:
            self._step.take_head()

    def faults(self) -> list[str]:
        """Where the captured steps read other weights than the model's, for people."""
        return [] if self._step is None else self._step.faults(self._model)

    def _capacity_for(self, requests: Sequence[Request], sampling: Sampling) -> Capacity:
        rollouts = sum(len(request.seeds) for request in requests)
        return Capacity.fitting(
            self._elements_per_token * (self._compute_dtype or self._model.dtype).itemsize,
            head_weight(self._model).shape[0],
            device_bytes(self._device),
            rollouts=rollouts,
            group=min(len(request.seeds) for request in requests),
            concurrency=self._concurrency,
            longest=(max(len(request.token_ids) for request in requests), sampling.max_new_tokens),
        )

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, version: Callable[[], int]
    ) -> Iterator[list[Answer]]:
        """`version` tells that of the weights; they may change between two items."""
        if not requests:
            return
        step = self.reserve(requests, sampling)
        key = step.begin(sampling)
        most = min(step.capacity.slots, self._concurrency)
        roster = Roster(requests, most, step.capacity.prompts, sampling.max_new_tokens - 1)
        drafts: dict[int, Draft] = {}
        looks: deque[Copy] = deque()
        fetched: deque[Copy] = deque()
        while not roster.is_done or fetched:
            for index in self._admit(step, roster, requests, key):
                drafts[index] = Draft(requests[index], version())
            count = roster.steps_ahead(STEPS_AHEAD)
            self._decode(step, roster.slots, count, key)
            left = roster.advance(count)
            looks.append(self._look(step, roster.seats))
            while len(looks) > 1 or (looks and count == 0):
                left += _ended(looks.popleft(), roster)
            if left:
                fetched.append(self._fetch(step, left, sampling.max_new_tokens, version()))
            whole = []
            while fetched and (fetched[0].is_there or not roster.slots):
                whole += _deliver(fetched.popleft(), drafts, sampling)
            if whole:
                yield [drafts.pop(request).answer() for request in whole]

    def _admit(self, step: DecodeStep, roster: Roster, requests: Sequence[Request], sampling: Sampling) -> list[int]:
        """Rollouts that wait take free slots; requests that are new, whose prompts go through the model, each once."""
        per_pass = max(1, MOST_PROMPT_TOKENS // step.capacity.prompt_columns)
        admitted: list[int] = []
        while True:
            seats, prompts = roster.admit(per_pass)
            if not seats:
                return admitted
            admitted += prompts
            place_of = {seat.request: seat.prompt for seat in seats}
            if prompts:
                self._prefill(step, [(place_of[index], requests[index].token_ids) for index in prompts])
            numbers = [
                (s.slot, requests[s.request].seeds[s.sample], s.prompt, len(requests[s.request].token_ids))
                for s in seats
            ]
            slots, seeds, places, lengths = self._to_device(torch.tensor(numbers).t().contiguous())
            state = step.state
            state.seed[slots], state.prompt[slots], state.prompt_length[slots] = seeds, places, lengths
            state.drawn[slots], state.finished[slots] = 0, False
            step.draw_first(slots, sampling)

    def _prefill(self, step: DecodeStep, prompts: Sequence[tuple[int, Sequence[int]]]) -> None:
        """In one row without padding, as the trainer's batches are; keys and values go to the prompts' places."""
        packed = to_device(PackedPrompts.of(prompts), self._device)
        cache = DynamicCache()
        with torch.autocast(self._device.type, dtype=self._compute_dtype, enabled=self._compute_dtype is not None):
            hidden = decoder_states(
                self._model,
                input_ids=packed.token_ids[None],
                position_ids=packed.position_ids[None],
                attention_mask=None,
                past_key_values=cache,
                use_cache=True,
                segments=packed.segments,
            )[0]
        step.prompt_states[packed.last_places] = hidden[packed.last_tokens].to(step.compute_dtype)
        for module, layer in zip(step.layers, cache.layers, strict=True):
            made: Any = layer
            for to, tokens in ((module.prompt_keys, made.keys[0]), (module.prompt_values, made.values[0])):
                to[packed.places, packed.position_ids] = tokens.transpose(0, 1).to(to.dtype)

    def _decode(self, step: DecodeStep, slots: list[int], count: int, sampling: Sampling) -> None:
        """Queues `count` steps of the smallest batch that holds these slots."""
        if count == 0:
            return
        size = rung_for(len(slots), ladder(step.capacity.slots))
        spare = [step.capacity.slots] * (size - len(slots))
        step.rows[:size] = self._to_device(torch.tensor(slots + spare))
        for _ in range(count):
            step.run(size, sampling)

    def _look(self, step: DecodeStep, seats: list[Seat]) -> Copy:
        """Asks which of these rollouts have ended."""
        slots = torch.tensor([seat.slot for seat in seats], dtype=torch.long)
        return Copy.of(seats, step.state.finished[self._to_device(slots)])

    def _fetch(self, step: DecodeStep, seats: list[Seat], longest: int, version: int) -> Copy:
        """The answers of rollouts that ended, copied out before another takes their slots."""
        slots, state = self._to_device(torch.tensor([seat.slot for seat in seats])), step.state
        tensors = (state.drawn[slots], state.ids[slots, :longest], state.logprobs[slots, :longest])
        return Copy.of(seats, *tensors, version=version)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without waiting for the device."""
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def _ended(look: Copy, roster: Roster) -> list[Seat]:
    """Takes those out that had ended when they were looked at and have not left since."""
    flags = look.wait()[0].tolist()
    slots = [seat.slot for seat, ended in zip(look.seats, flags, strict=True) if ended and roster.is_seated(seat)]
    return roster.leave(slots)


def _deliver(fetched: Copy, drafts: Mapping[int, Draft], sampling: Sampling) -> list[int]:
    """Writes rollouts to their drafts; returns the requests that became whole."""
    whole = []
    counts, ids, logprobs = (tensor.tolist() for tensor in fetched.wait())
    for seat, count, row_ids, row_logprobs in zip(fetched.seats, counts, ids, logprobs, strict=True):
        reason = "stop" if row_ids[count - 1] in sampling.stop_ids else "length"
        drafts[seat.request].add(seat.sample, row_ids[:count], row_logprobs[:count], reason, fetched.version)
        if drafts[seat.request].is_whole:
            whole.append(seat.request)
    return whole
