"""Continuous batching with captured decode steps: prompts join, rollouts are decoded together, finished ones leave.

All callers share one set of slots and one captured step per batch size; each rollout has its own sampling. The host
runs ahead of the device: it queues a few steps, and only then looks at which rollouts had ended some steps before. So
a rollout that ended is decoded for a few steps more, to no effect, and the device never waits for the host.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from podium.engine.cuda.decode_step import Capacity, DecodeStep
from podium.engine.cuda.roster import Roster, Seat, ladder, rung_for
from podium.engine.decoding.queue import Arrivals, Outcome
from podium.engine.decoding.sampling import RowSampling, kind_of
from podium.model.attention import Segments
from podium.model.forward import decoder_states, head_weight, to_device
from podium.model.memory import cache_elements_per_token, device_bytes
from podium.records import Request

STEPS_AHEAD = 4
"""Decode steps between two looks at what has ended."""
MOST_PROMPT_TOKENS = 1 << 15
"""Of prompts that go through the model together."""
LOOKS_PER_TURN = 8
"""After so many looks without an answer, other work of the device thread gets its turn."""


@dataclass
class Copy:
    """Tensors that are being copied to the host, and the event after which they are there."""

    seats: list[Seat]
    tensors: list[torch.Tensor]
    version: int
    """Of the weights when the copy began."""
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


class CapturedDecoder:
    """`model` computes prompts; a twin of it, made with the first request, decodes. `version` gives that of the
    weights."""

    def __init__(
        self, model: PreTrainedModel, concurrency: int, compute_dtype: torch.dtype | None, version: Callable[[], int]
    ) -> None:
        self._model, self._concurrency, self._compute_dtype = model, concurrency, compute_dtype
        self._version, self._device = version, model.device
        self._step: DecodeStep | None = None
        self._roster = Roster()

    def reserve(self, requests: Sequence[Request]) -> DecodeStep:
        """Room for these requests, and for all that there was room for before as far as memory allows. Only while no
        rollout is seated."""
        if not self._has_room_for(requests):
            wanted = self._capacity_for(requests)
            self._step = None  # its memory first
            self._step = DecodeStep(self._model, wanted, self._compute_dtype)
            self._resize(wanted)
        assert self._step is not None
        return self._step

    def _resize(self, capacity: Capacity) -> None:
        self._roster.resize(min(capacity.slots, self._concurrency), capacity.prompts)

    @cached_property
    def _elements_per_token(self) -> int:
        return cache_elements_per_token(self._model, self._compute_dtype)

    def take_weights(self) -> None:
        """After new weights were written into the model: updates what the steps keep a copy of. Prompts computed before
        are not used for further rollouts."""
        self._roster.loads += 1
        if self._step is not None:
            self._step.take_head()

    def faults(self) -> list[str]:
        """Where the captured steps read other weights than the model's, for people."""
        return [] if self._step is None else self._step.faults(self._model)

    def _has_room_for(self, requests: Sequence[Request]) -> bool:
        return self._step is not None and self._step.capacity.holds(self._capacity_for(requests))

    def _capacity_for(self, requests: Sequence[Request]) -> Capacity:
        """Where an answer is longer than any before, memory may hold fewer rollouts than before."""
        before = None if self._step is None else self._step.capacity
        longest = [max(len(each.token_ids) for each in requests), max(e.sampling.max_new_tokens for e in requests)]
        stops, rollouts = max(len(each.sampling.stop_ids) for each in requests), len(requests)
        if before is not None:
            longest = [max(longest[0], before.prompt_columns), max(longest[1], before.columns)]
            stops, rollouts = max(stops, before.stops), max(rollouts, before.slots)
        groups = [each.prefix_group for each in requests]
        return Capacity.fitting(
            self._elements_per_token * (self._compute_dtype or self._model.dtype).itemsize,
            head_weight(self._model).shape[0],
            device_bytes(self._device),
            rollouts=rollouts,
            group=min(1 if group is None else group.size for group in groups),
            concurrency=self._concurrency,
            longest=(longest[0], longest[1]),
            stops=stops,
        )

    @torch.no_grad()
    def run(self, arrivals: Arrivals) -> Iterator[list[Outcome]]:
        roster = self._roster
        roster.waiting.clear()
        looks: deque[Copy] = deque()
        fetched: deque[Copy] = deque()
        is_too_small = True
        if self._step is not None:
            self._step.take_head()
            self._resize(self._step.capacity)  # a run that was given up may have left something
        for turn in count(1):
            is_too_small |= self._take(arrivals)
            if roster.is_done and not fetched:
                return
            if is_too_small and roster.waiting and not roster.slots:
                self.reserve([job.request for job in roster.waiting])
                is_too_small = False
            if not is_too_small:  # otherwise the seated rollouts end first, then there will be more room
                self._admit()
            steps = roster.steps_ahead(STEPS_AHEAD)
            self._decode(steps)
            left = roster.advance(steps)
            if roster.slots:
                looks.append(self._look(roster.seats))
            while len(looks) > 1 or (looks and steps == 0):
                left += _ended(looks.popleft(), roster)
            if left:
                fetched.append(self._fetch(left))
            outcomes = _delivered(fetched, wait=not roster.slots)
            if outcomes or turn % LOOKS_PER_TURN == 0:
                yield outcomes

    def _take(self, arrivals: Arrivals) -> bool:
        """Takes in what has arrived since the last turn; whether it needs more room than there is."""
        roster, new = self._roster, arrivals.take()
        roster.waiting.extend(new)
        roster.drop_cancelled()
        for name in arrivals.take_released():
            roster.release(name)
        if not new:
            return False
        seated = [seat.job.request for seat in roster.seats]
        return not self._has_room_for(seated + [job.request for job in roster.waiting])

    def _admit(self) -> None:
        """Waiting rollouts take free slots; prompts that are new go through the model, each once."""
        step, roster = self._step, self._roster
        if step is None:
            return
        per_pass = max(1, MOST_PROMPT_TOKENS // step.capacity.prompt_columns)
        while True:
            seats, places = roster.admit(per_pass)
            if not seats:
                return
            if places:
                self._prefill(step, [(place.index, place.token_ids) for place in places])
            numbers = [(s.slot, s.job.request.seed, s.place.index, len(s.place.token_ids)) for s in seats]
            slots, seeds, indices, lengths = self._to_device(torch.tensor(numbers).t().contiguous())
            samplings = [seat.job.request.sampling for seat in seats]
            rows, state = RowSampling.of(samplings, torch.device("cpu"), step.capacity.stops), step.state
            for name, column in vars(rows).items():
                getattr(state.sampling, name)[slots] = self._to_device(column)
            state.seed[slots], state.prompt[slots], state.prompt_length[slots] = seeds, indices, lengths
            state.drawn[slots], state.finished[slots] = 0, False
            step.draw_first(slots, kind_of(samplings))
            for seat in seats:
                seat.job.first_version = self._version()

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

    def _decode(self, steps: int) -> None:
        """Queues steps of the smallest batch that holds the seated rollouts."""
        step, seats = self._step, self._roster.seats
        if steps == 0 or step is None:
            return
        size = rung_for(len(seats), ladder(step.capacity.slots))
        spare = [step.capacity.slots] * (size - len(seats))
        step.rows[:size] = self._to_device(torch.tensor([seat.slot for seat in seats] + spare))
        kind = kind_of([seat.job.request.sampling for seat in seats])
        for _ in range(steps):
            step.run(size, kind)

    def _look(self, seats: list[Seat]) -> Copy:
        """Asks which of these rollouts have ended."""
        assert self._step is not None
        slots = torch.tensor([seat.slot for seat in seats], dtype=torch.long)
        return Copy.of(seats, self._step.state.finished[self._to_device(slots)])

    def _fetch(self, seats: list[Seat]) -> Copy:
        """The answers of rollouts that ended, copied out before another takes their slots."""
        assert self._step is not None
        slots, state = self._to_device(torch.tensor([seat.slot for seat in seats])), self._step.state
        longest = max(seat.job.request.sampling.max_new_tokens for seat in seats)
        tensors = (state.drawn[slots], state.ids[slots, :longest], state.logprobs[slots, :longest])
        return Copy.of(seats, *tensors, version=self._version())

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without waiting for the device."""
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def _ended(look: Copy, roster: Roster) -> list[Seat]:
    """Takes out the rollouts that had ended at the time of the look and have not left since."""
    flags = look.wait()[0].tolist()
    slots = [seat.slot for seat, ended in zip(look.seats, flags, strict=True) if ended and roster.is_seated(seat)]
    return roster.leave(slots)


def _delivered(fetched: deque[Copy], wait: bool) -> list[Outcome]:
    """The answers that have reached the host; with `wait`, all."""
    outcomes: list[Outcome] = []
    while fetched and (wait or fetched[0].is_there):
        copy = fetched.popleft()
        rows = zip(copy.seats, *(tensor.tolist() for tensor in copy.wait()), strict=True)
        outcomes += [(seat.job, seat.job.ended(ids[:n], lps[:n], copy.version)) for seat, n, ids, lps in rows]
    return outcomes
