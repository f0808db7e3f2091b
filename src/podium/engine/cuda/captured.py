"""Continuous batching with captured decode steps: prompts join, rollouts are decoded together, finished ones leave.

All callers share one set of slots and one captured step per batch size; each rollout has its own sampling. The host
runs ahead of the device: it queues a few steps, and only then looks at which rollouts had ended some steps before. So
a rollout that ended is decoded for a few steps more, to no effect, and the device never waits for the host.

Keys and values lie in pages, which rollouts take as they grow. Kernels run in the order in which they are queued, so a
page that the host gives to another rollout is written by it only after the steps that still read it. A rollout that
was paused for lack of pages goes on with its next token once its own tokens have gone through the model again.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from podium.engine.cuda.decode_step import Capacity, DecodeStep, attention_modules
from podium.engine.cuda.roster import LEAST_BATCH, PAGE, Admission, Place, Roster, Seat, ladder, rung_for
from podium.engine.decoding.queue import Arrivals, Outcome
from podium.engine.decoding.sampling import RowSampling, kind_of
from podium.errors import InputError
from podium.model.attention import Segments, SharedKeys
from podium.model.forward import decoder_states, head_weight, to_device
from podium.model.memory import unused_bytes
from podium.records import Request

STEPS_AHEAD = 4
"""Decode steps between two looks at what has ended."""
MOST_PROMPT_TOKENS = 1 << 15
"""Of prompts, and of paused rollouts, that go through the model together."""
FREE_SHARE = 0.8
"""Of the memory that the device has left, for keys and values where no plan says how much they may take. The rest is
for what prompts need on their way through the model, fragments and other programs."""
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
class Text:
    """Tokens that go through the model, and where in the pages their keys are."""

    token_ids: Sequence[int]
    """Those to be computed."""
    columns: np.ndarray
    """int64, of these tokens and of all before them, which have been computed. Page n has columns n · PAGE and on."""
    place: Place | None
    """The place whose prompt is computed here."""

    @classmethod
    def of(cls, admission: Admission) -> "Text":
        """The prompt if it is new, then the rollout's own tokens if it was paused."""
        seat = admission.seat
        place, prompt = seat.place, seat.place.token_ids
        own = seat.written.wait()[0].tolist()[: seat.steps] if admission.is_resumed else []
        columns = np.concatenate([_columns(place.pages, len(prompt)), _columns(seat.pages, len(own))])
        return cls([*prompt, *own], columns, place) if admission.is_place_new else cls(own, columns, None)


def _columns(pages: Sequence[int], count: int) -> np.ndarray:
    """The first `count` columns of these pages, one after the other."""
    return (np.array(pages, np.int64)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:count]


@dataclass(frozen=True)
class PackedTexts:
    """Texts one after the other; L tokens, K keys, N new prompts."""

    token_ids: torch.Tensor
    """int64 `[L]`"""
    position_ids: torch.Tensor
    """int64 `[L]`"""
    columns: torch.Tensor
    """int64 `[L]`, where keys and values of the tokens go."""
    keys: torch.Tensor | None
    """int64 `[K]`, where those that the tokens attend to are; None: exactly the tokens' own, in their order."""
    last_tokens: torch.Tensor
    """int64 `[N]`"""
    last_places: torch.Tensor
    """int64 `[N]`"""
    segments: Segments

    @classmethod
    def of(cls, texts: Sequence[Text]) -> "PackedTexts":
        lengths = np.array([len(text.token_ids) for text in texts])
        key_lengths = np.array([len(text.columns) for text in texts])
        starts = lengths.cumsum() - lengths
        is_continued = bool((key_lengths > lengths).any())
        prompts = [(start, text.place) for start, text in zip(starts, texts, strict=True) if text.place is not None]
        return cls(
            token_ids=torch.tensor([i for text in texts for i in text.token_ids]),
            position_ids=torch.from_numpy(
                np.concatenate([np.arange(len(t.columns))[-len(t.token_ids) :] for t in texts])
            ),
            columns=torch.from_numpy(np.concatenate([text.columns[-len(text.token_ids) :] for text in texts])),
            keys=torch.from_numpy(np.concatenate([text.columns for text in texts])) if is_continued else None,
            last_tokens=torch.tensor([start + len(place.token_ids) - 1 for start, place in prompts], dtype=torch.long),
            last_places=torch.tensor([place.index for _, place in prompts], dtype=torch.long),
            segments=Segments.of(lengths, key_lengths, _all_keys(key_lengths.sum()) if is_continued else None),
        )


def _all_keys(count: int) -> SharedKeys:
    """For keys that come segment by segment already; what only a backward pass reads is left empty."""
    nothing = torch.zeros(0, dtype=torch.long)
    return SharedKeys(torch.arange(count), nothing, nothing, nothing)


class PagedLayer(DynamicLayer):
    """The pages of one layer while texts go through the model: new keys and values are written into them."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, packed: PackedTexts) -> None:
        super().__init__()
        self._pools, self._packed = (keys.flatten(0, 1), values.flatten(0, 1)), packed  # [columns, heads, head_dim]

    def update(self, key_states, value_states, *args, **kwargs):
        """`[1, heads, L, head_dim]` each; returns what the texts attend to, `[1, heads, K, head_dim]`."""
        new = key_states, value_states
        for pool, tokens in zip(self._pools, new, strict=True):
            pool[self._packed.columns] = tokens[0].transpose(0, 1).to(pool.dtype)
        if self._packed.keys is None:
            return new
        return tuple(
            pool[self._packed.keys].transpose(0, 1)[None].to(tokens.dtype)
            for pool, tokens in zip(self._pools, new, strict=True)
        )


class CapturedDecoder:
    """`model` computes prompts; a twin of it, made with the first request, decodes. `version` gives that of the
    weights. `cache_bytes` is what keys, values and logits may take; None: most of what the device has left at the first
    request."""

    def __init__(
        self,
        model: PreTrainedModel,
        concurrency: int,
        compute_dtype: torch.dtype | None,
        version: Callable[[], int],
        cache_bytes: int | None = None,
    ) -> None:
        self._model, self._concurrency, self._compute_dtype = model, concurrency, compute_dtype
        self._version, self._device, self._given_bytes = version, model.device, cache_bytes
        self._step: DecodeStep | None = None
        self._roster = Roster()

    def check_room(self, request: Request) -> None:
        """Refuses a request that would not fit even if it were alone."""
        capacity = self._capacity([request], is_alone=True)
        if not capacity.takes(request):
            raise InputError(
                f"{request.label} has {len(request.token_ids)} tokens and may get {request.sampling.max_new_tokens} "
                f"more; the memory for keys and values, {self._budget / 1e9:.2f} GB, holds "
                f"{max(0, capacity.pages - 1) * PAGE}; shorten the prompt, lower max_new_tokens, or leave the engine "
                "more memory (lower pack.max_tokens_per_batch, set trainer.gradient_checkpointing)"
            )

    def reserve(self, requests: Sequence[Request]) -> DecodeStep:
        """Room for these requests, and for all that there was room for before as far as memory allows. Only while no
        rollout is seated or paused."""
        for request in requests:
            self.check_room(request)
        if not self._has_room_for(requests):
            wanted = self._capacity(requests)
            if not all(map(wanted.takes, requests)):
                raise InputError(
                    f"the memory for keys and values, {self._budget / 1e9:.2f} GB, does not hold the longest prompt "
                    "together with the longest answer so far; shorten one of them, or leave the engine more memory"
                )
            self._step = None  # its memory first
            self._step = DecodeStep(self._model, wanted, self._compute_dtype)
            self._resize(wanted)
        assert self._step is not None
        return self._step

    def _resize(self, capacity: Capacity) -> None:
        self._roster.resize(min(capacity.slots, self._concurrency), capacity.pages)

    @cached_property
    def _bytes_per_token(self) -> int:
        """Of keys and values, in all layers; the same for models of which no layer has any."""
        heads = sum(2 * module.k_proj.out_features for module in attention_modules(self._model))
        return max(1, heads) * (self._compute_dtype or self._model.dtype).itemsize

    @cached_property
    def _budget(self) -> int:
        """Bytes for keys, values and logits. Looked at once, so that the same requests always find the same room."""
        if self._given_bytes is not None:
            return self._given_bytes
        return int(FREE_SHARE * unused_bytes(self._device))

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
        if self._step is None:
            return False
        capacity = self._step.capacity
        return capacity.holds(self._capacity(requests)) and all(map(capacity.takes, requests))

    def _capacity(self, requests: Sequence[Request], *, is_alone: bool = False) -> Capacity:
        """For these requests and, as far as memory allows, all that there was room for before. Where an answer is
        longer than any before, there may be room for fewer rollouts than before. A request that `is_alone` may have
        all the memory."""
        before = None if self._step is None or is_alone else self._step.capacity
        rollouts = LEAST_BATCH if is_alone else len(requests)
        longest = [max(len(each.token_ids) for each in requests), max(e.sampling.max_new_tokens for e in requests)]
        stops = max(len(each.sampling.stop_ids) for each in requests)
        if before is not None:
            longest = [max(longest[0], before.prompt_columns), max(longest[1], before.columns)]
            stops, rollouts = max(stops, before.stops), max(rollouts, before.slots)
        groups = [each.prefix_group for each in requests]
        return Capacity.fitting(
            self._bytes_per_token,
            head_weight(self._model).shape[0],
            self._budget,
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
            if is_too_small and roster.waiting and roster.is_empty:
                self.reserve([job.request for job in roster.waiting])
                is_too_small = False
            if not self._make_room():  # what was paused now is not resumed in the same turn
                self._admit(only_paused=is_too_small)  # what has begun ends first, then there will be more room
            steps = roster.steps_ahead(STEPS_AHEAD)
            self._decode(steps)
            left = roster.advance(steps)
            if roster.seats:
                looks.append(self._look(roster.seats))
            while len(looks) > 1 or (looks and steps == 0):
                left += _ended(looks.popleft(), roster)
            if left:
                fetched.append(self._fetch(left))
            outcomes = _delivered(fetched, wait=not roster.seats)
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
        under_way = [seat.job.request for seat in (*roster.seats, *roster.paused)]
        return not self._has_room_for(under_way + [job.request for job in roster.waiting])

    def _make_room(self) -> list[Seat]:
        """Pages for the next steps of the seated rollouts; those that had to be paused for it."""
        paused = self._roster.grow(STEPS_AHEAD)
        for seat in paused:
            assert self._step is not None
            seat.written = Copy.of([seat], self._step.state.ids[seat.slot, : seat.steps + 1])
        return paused

    def _admit(self, *, only_paused: bool) -> None:
        """Rollouts take seats; what is new or was given up goes through the model, a shared prompt once."""
        step = self._step
        if step is None:
            return
        while admitted := self._roster.admit(MOST_PROMPT_TOKENS, STEPS_AHEAD, only_paused=only_paused):
            texts = [text for each in admitted if (text := Text.of(each)).token_ids]
            if texts:
                self._prefill(step, texts)
            if begun := [each.seat for each in admitted if not each.is_resumed]:
                self._begin(step, begun)
            for seat in (each.seat for each in admitted if each.is_resumed):
                seat.written = None

    def _begin(self, step: DecodeStep, seats: list[Seat]) -> None:
        """Draws the first tokens of rollouts whose prompts have been computed."""
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

    def _prefill(self, step: DecodeStep, texts: Sequence[Text]) -> None:
        """In one row without padding, as the trainer's batches are; keys and values go to the pages."""
        packed = to_device(PackedTexts.of(texts), self._device)
        layers: list[Any] = [PagedLayer(each.paged_keys, each.paged_values, packed) for each in step.layers]
        with torch.autocast(self._device.type, dtype=self._compute_dtype, enabled=self._compute_dtype is not None):
            hidden = decoder_states(
                self._model,
                input_ids=packed.token_ids[None],
                position_ids=packed.position_ids[None],
                attention_mask=None,
                past_key_values=Cache(layers=layers),
                use_cache=True,
                segments=packed.segments,
            )[0]
        step.prompt_states[packed.last_places] = hidden[packed.last_tokens].to(step.compute_dtype)

    def _decode(self, steps: int) -> None:
        """Queues steps of the smallest batch that holds the seated rollouts."""
        step, seats = self._step, self._roster.seats
        if steps == 0 or step is None:
            return
        size = rung_for(len(seats), ladder(step.capacity.slots))
        spare = [step.capacity.slots] * (size - len(seats))
        step.rows[:size] = self._to_device(torch.tensor([seat.slot for seat in seats] + spare))
        self._send_tables(step)
        kind = kind_of([seat.job.request.sampling for seat in seats])
        for _ in range(steps):
            step.run(size, kind)

    def _send_tables(self, step: DecodeStep) -> None:
        """The pages that slots have taken since the last steps, in one small copy."""
        if changes := self._roster.take_changes():
            width = step.capacity.table_width
            entries = [(slot * width + number, page) for (slot, number), page in changes.items()]
            where, pages = self._to_device(torch.tensor(entries).t().contiguous())
            step.tables.view(-1)[where] = pages.to(step.tables.dtype)

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
    """Takes out the rollouts that had ended at the time of the look and have not left since, those that were paused
    meanwhile included."""
    flags = look.wait()[0].tolist()
    seats = [seat for seat, ended in zip(look.seats, flags, strict=True) if ended and roster.is_under_way(seat)]
    return roster.leave(seats)


def _delivered(fetched: deque[Copy], wait: bool) -> list[Outcome]:
    """The answers that have reached the host; with `wait`, all."""
    outcomes: list[Outcome] = []
    while fetched and (wait or fetched[0].is_there):
        copy = fetched.popleft()
        rows = zip(copy.seats, *(tensor.tolist() for tensor in copy.wait()), strict=True)
        outcomes += [(seat.job, seat.job.ended(ids[:n], lps[:n], copy.version)) for seat, n, ids, lps in rows]
    return outcomes
