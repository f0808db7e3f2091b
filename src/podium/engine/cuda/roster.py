"""Which rollout occupies which slot of the CUDA engine: plain bookkeeping on the host, without a tensor.

Jobs wait in the order in which they arrive and take free slots one by one. The first job of a prefix group also takes a
place for the prompt, which the group shares. A place stays until the group's last rollout has ended; while no rollout
uses it, it is given to another prompt if places run out, and its prompt is computed again when needed. A batch is a
list of slots, so a rollout that ended leaves it without a copy. The host learns some steps late that a rollout has
ended, by asking the device, or at once, when a slot has made as many steps as its answer may have.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from podium.engine.decoding.queue import Job
from podium.records import PrefixGroup

LADDER_STEP = 64
"""Batch sizes above this are multiples of it, those below are powers of two."""
LEAST_BATCH = 8


def ladder(most: int) -> tuple[int, ...]:
    """The batch sizes for which a decode step is captured. The largest holds `most` rows."""
    sizes = [LEAST_BATCH]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + min(sizes[-1], LADDER_STEP))
    return tuple(sizes)


def rung_for(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `count` rows."""
    return next(size for size in sizes if size >= count)


@dataclass(eq=False)
class Place:
    """Room for the keys and values of one prompt."""

    index: int
    token_ids: tuple[int, ...]
    group: PrefixGroup | None
    loads: int
    """Loads of weights before the prompt was computed. Another rollout uses the place only while there was no other."""
    num_seated: int = 0
    num_missing: int = 1
    """Rollouts of the group that have not ended."""

    def is_for(self, job: Job, loads: int) -> bool:
        return (
            self.group is not None
            and self.group == job.request.prefix_group
            and self.token_ids == job.request.token_ids
            and self.loads == loads
        )


@dataclass(frozen=True, eq=False)
class Seat:
    """One rollout in its slot."""

    slot: int
    job: Job
    place: Place

    @property
    def most_steps(self) -> int:
        """Steps after the first token, which is drawn from the prompt."""
        return self.job.request.sampling.max_new_tokens - 1


@dataclass
class Roster:
    """`num_slots` rollouts and `num_places` prompts have room at the same time."""

    num_slots: int = 0
    num_places: int = 0
    waiting: deque[Job] = field(default_factory=deque)
    loads: int = 0
    """Loads of weights so far."""

    def __post_init__(self) -> None:
        self.resize(self.num_slots, self.num_places)

    def resize(self, num_slots: int, num_places: int) -> None:
        """Only while no rollout is seated."""
        self._free_slots, self._free_places = deque(range(num_slots)), deque(range(num_places))
        self._places: dict[int, Place] = {}
        self._seats: dict[int, Seat] = {}
        self._steps: dict[int, int] = {}

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self._seats

    @property
    def slots(self) -> list[int]:
        """Those whose rollout has not ended, as far as is known."""
        return list(self._seats)

    @property
    def seats(self) -> list[Seat]:
        """Of the slots, in their order."""
        return list(self._seats.values())

    def admit(self, max_prompts: int) -> tuple[list[Seat], list[Place]]:
        """(rollouts that take a seat now, places whose prompts have to be computed for them), prompts limited."""
        seats: list[Seat] = []
        new: list[Place] = []
        while self.waiting and self._free_slots:
            job = self.waiting[0]
            if job.is_cancelled:
                self.waiting.popleft()
                continue
            place = next((each for each in self._places.values() if each.is_for(job, self.loads)), None)
            if place is None:
                if len(new) == max_prompts or (place := self._take_place(job)) is None:
                    break
                new.append(place)
            self.waiting.popleft()
            place.num_seated += 1
            seat = Seat(self._free_slots.popleft(), job, place)
            seats.append(seat)
            self._seats[seat.slot], self._steps[seat.slot] = seat, 0
        return seats, new

    def steps_ahead(self, most: int) -> int:
        """Steps that are of use to at least one rollout, `most` at most."""
        left = (self._seats[slot].most_steps - made for slot, made in self._steps.items())
        return min(most, max(left, default=0))

    def advance(self, steps: int) -> list[Seat]:
        """Counts steps for all seats, and frees those whose answers are full, whether they ended before or not."""
        for slot in self._steps:
            self._steps[slot] += steps
        return self.leave([slot for slot, made in self._steps.items() if made >= self._seats[slot].most_steps])

    def leave(self, slots: Iterable[int]) -> list[Seat]:
        """Takes rollouts out that have ended; their slots may be taken again at once."""
        left = [self._seats.pop(slot) for slot in slots]
        for seat in left:
            del self._steps[seat.slot]
            self._free_slots.append(seat.slot)
            seat.place.num_seated -= 1
            seat.place.num_missing -= 1
            self._free_if_unused(seat.place)
        return left

    def drop_cancelled(self) -> None:
        """Frees the slots of jobs that nobody waits for."""
        self.leave([slot for slot, seat in self._seats.items() if seat.job.is_cancelled])

    def release(self, name: str) -> None:
        """No further rollout of the prefix group of that name will come."""
        for place in [each for each in self._places.values() if each.group is not None and each.group.name == name]:
            place.num_missing = place.num_seated
            self._free_if_unused(place)

    def is_seated(self, seat: Seat) -> bool:
        """Whether it is still this rollout that occupies the slot."""
        return self._seats.get(seat.slot) is seat

    def _take_place(self, job: Job) -> Place | None:
        if not self._free_places:
            idle = next((each for each in self._places.values() if each.num_seated == 0), None)
            if idle is None:
                return None
            self._free(idle)
        group = job.request.prefix_group
        place = Place(self._free_places.popleft(), job.request.token_ids, group, self.loads)
        place.num_missing = 1 if group is None else group.size
        self._places[place.index] = place
        return place

    def _free_if_unused(self, place: Place) -> None:
        is_old = place.loads != self.loads
        if place.num_seated == 0 and (place.num_missing <= 0 or is_old) and self._places.get(place.index) is place:
            self._free(place)

    def _free(self, place: Place) -> None:
        del self._places[place.index]
        self._free_places.append(place.index)
