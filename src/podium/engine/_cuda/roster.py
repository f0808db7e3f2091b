"""Who sits in which slot of the CUDA engine: plain bookkeeping on the host, without a tensor.

Rollouts wait in the order of their requests and take free slots one by one; the first of a request also takes a place
for the prompt, which the group shares and gives back with its last rollout. A batch is a list of slots, so rollouts
that ended leave it without anything being copied. What has ended is known some steps late, by asking the device, or
at once, when a slot has made as many steps as an answer may have.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from podium.records import Request

LADDER_STEP = 64
"""Batch sizes above this are multiples of it, those below are powers of two."""
LEAST_BATCH = 8


def ladder(most: int) -> tuple[int, ...]:
    """The batch sizes for which a decode step is captured, the largest holding `most` rows."""
    sizes = [LEAST_BATCH]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + min(sizes[-1], LADDER_STEP))
    return tuple(sizes)


def rung_for(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `count` rows."""
    return next(size for size in sizes if size >= count)


@dataclass(frozen=True)
class Seat:
    """One rollout in its slot."""

    slot: int
    request: int
    """Its index among the requests of the call."""
    sample: int
    prompt: int
    """The place of the group's prompt."""


class Roster:
    """`num_slots` rollouts and `num_prompts` prompts have room at the same time; an answer takes `most_steps` steps at
    most after its first token."""

    def __init__(self, requests: Sequence[Request], num_slots: int, num_prompts: int, most_steps: int) -> None:
        self._waiting = deque((index, sample) for index, r in enumerate(requests) for sample in range(len(r.seeds)))
        self._free_slots = deque(range(num_slots))
        self._free_prompts = deque(range(num_prompts))
        self._missing = [len(request.seeds) for request in requests]
        """Rollouts of each request that have not ended."""
        self._prompt_of: dict[int, int] = {}
        self._most_steps = most_steps
        self._seats: dict[int, Seat] = {}
        self._steps: dict[int, int] = {}

    @property
    def is_done(self) -> bool:
        return not self._waiting and not self._seats

    @property
    def slots(self) -> list[int]:
        """Those whose rollout has not ended, as far as is known."""
        return list(self._seats)

    def admit(self, max_prompts: int) -> tuple[list[Seat], list[int]]:
        """(rollouts that take a seat now, requests whose prompt has to be computed for them), prompts limited."""
        seats: list[Seat] = []
        prompts: list[int] = []
        while self._waiting and self._free_slots:
            request, sample = self._waiting[0]
            if request not in self._prompt_of:
                if not self._free_prompts or len(prompts) == max_prompts:
                    break
                self._prompt_of[request] = self._free_prompts.popleft()
                prompts.append(request)
            self._waiting.popleft()
            seat = Seat(self._free_slots.popleft(), request, sample, self._prompt_of[request])
            seats.append(seat)
            self._seats[seat.slot], self._steps[seat.slot] = seat, 0
        return seats, prompts

    def steps_ahead(self, most: int) -> int:
        """Steps that are of use to at least one rollout, `most` at most."""
        return min(most, max((self._most_steps - made for made in self._steps.values()), default=0))

    def advance(self, steps: int) -> list[Seat]:
        """Counts steps for all that sit, and lets those go whose answers are full, whether they ended before or not."""
        for slot in self._steps:
            self._steps[slot] += steps
        return self.leave([slot for slot, made in self._steps.items() if made >= self._most_steps])

    def leave(self, slots: Iterable[int]) -> list[Seat]:
        """Takes rollouts out that have ended; their slots may be taken again at once."""
        left = [self._seats.pop(slot) for slot in slots]
        for seat in left:
            del self._steps[seat.slot]
            self._free_slots.append(seat.slot)
            self._missing[seat.request] -= 1
            if self._missing[seat.request] == 0:
                self._free_prompts.append(self._prompt_of.pop(seat.request))
        return left

    def is_seated(self, seat: Seat) -> bool:
        """Whether it is still this rollout that sits in the slot."""
        return self._seats.get(seat.slot) == seat

    @property
    def seats(self) -> list[Seat]:
        """Of the slots, in their order."""
        return list(self._seats.values())
