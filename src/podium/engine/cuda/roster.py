"""Which rollout occupies which slot and which pages of the CUDA engine: plain bookkeeping without a tensor.

Keys and values lie in pages of a fixed number of tokens. A page is a number: page n of every layer belongs to the same
owner. Page 0 belongs to nobody: rows of a batch that nobody needs write there, so it is never handed out.

Jobs wait in the order in which they arrive and take free slots one by one. The first job of a prefix group also takes a
place for the prompt, whose pages the group shares. A place stays until the group's last rollout has ended; while no
rollout uses it, its pages are taken for others when pages run out, and its prompt is computed again when needed. A
batch is a list of slots, so a rollout that ended leaves it without a copy. The host learns some steps late that a
rollout has ended, by asking the device, or at once, when a slot has made as many steps as its answer may have.

A rollout takes pages as it grows, always for the next steps. When no page is left, the youngest rollout is paused: it
keeps its slot, gives up its pages and goes on as soon as there are pages again, before any new job. All of this follows
from counts, never from time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from podium.engine.decoding.queue import Job
from podium.records import PrefixGroup

PAGE = 64
"""Tokens of a page; a multiple of the attention kernel's block, so that a block never crosses a page."""
SPARE_PAGE = 0
LADDER_STEP = 64
"""Batch sizes above this are multiples of it, those below are powers of two."""
LEAST_BATCH = 8
ROLLOUTS_PER_RESERVED_PAGE = 8
"""While rollouts are seated, one page for so many of them stays free when another is admitted, so that they can grow
and the newcomer is not paused at once."""


def ladder(most: int) -> tuple[int, ...]:
    """The batch sizes for which a decode step is captured. The largest holds `most` rows."""
    sizes = [LEAST_BATCH]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + min(sizes[-1], LADDER_STEP))
    return tuple(sizes)


def rung_for(count: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds `count` rows."""
    return next(size for size in sizes if size >= count)


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE)


def reserved_pages(num_seated: int) -> int:
    """Pages that stay free while so many rollouts are seated and another is admitted."""
    return -(-num_seated // ROLLOUTS_PER_RESERVED_PAGE)


@dataclass(eq=False)
class Place:
    """The keys and values of one prompt."""

    index: int
    token_ids: tuple[int, ...]
    group: PrefixGroup | None
    loads: int
    """Loads of weights before the prompt was computed. Another rollout uses the place only while there was no other."""
    pages: list[int]
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


@dataclass(eq=False)
class Seat:
    """One rollout in its slot."""

    slot: int
    job: Job
    number: int
    """Seats are numbered in the order of admission. The youngest rollout has the highest number."""
    place: Place = field(init=False)
    """Set when it is seated."""
    pages: list[int] = field(default_factory=list)
    """For the rollout's own tokens, which begin on a page of their own."""
    steps: int = 0
    """Decode steps queued so far. Until the answer ends, each one draws a token after the first."""
    written: Any = None
    """The decoder's: where the tokens drawn so far are, while the rollout is paused."""

    @property
    def most_steps(self) -> int:
        """Steps after the first token, which is drawn from the prompt."""
        return self.job.request.sampling.max_new_tokens - 1

    def pages_after(self, steps: int) -> int:
        """Own pages that so many more steps write to. A step writes the keys of the token drawn before it; a rollout
        that has ended writes those of its last token again."""
        return pages_for(min(self.steps + steps, self.most_steps + 1))


@dataclass(frozen=True, eq=False)
class Admission:
    """A rollout that takes a seat, and what has to be computed for it."""

    seat: Seat
    is_place_new: bool
    """Whether its prompt has to be computed."""
    is_resumed: bool
    """Whether it was paused: its own tokens have to be computed again, and no first token is drawn."""


@dataclass
class Roster:
    """`num_slots` rollouts and `num_pages` pages, the spare page among them."""

    num_slots: int = 0
    num_pages: int = 0
    waiting: deque[Job] = field(default_factory=deque)
    loads: int = 0
    """Loads of weights so far."""

    def __post_init__(self) -> None:
        self.resize(self.num_slots, self.num_pages)

    def resize(self, num_slots: int, num_pages: int) -> None:
        """Only while no rollout is seated or paused. There are as many places as slots, since a seat uses one."""
        self._free_slots, self._free_places = deque(range(num_slots)), deque(range(num_slots))
        self._free_pages = deque(page for page in range(num_pages) if page != SPARE_PAGE)
        self._places: dict[int, Place] = {}
        self._seats: dict[int, Seat] = {}
        self.paused: list[Seat] = []
        """The oldest first. They have a slot and no pages."""
        self._num_admitted = 0
        self._changes: dict[tuple[int, int], int] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no rollout has begun that has not ended."""
        return not self._seats and not self.paused

    @property
    def is_done(self) -> bool:
        return self.is_empty and not self.waiting

    @property
    def seats(self) -> list[Seat]:
        """Rollouts that are being written and have not ended, as far as is known."""
        return list(self._seats.values())

    def take_changes(self) -> dict[tuple[int, int], int]:
        """What has changed in the page tables since the last call: (slot, number of its page) → page."""
        changes, self._changes = self._changes, {}
        return changes

    def grow(self, steps: int) -> list[Seat]:
        """Gives each rollout the pages for so many steps, the oldest first, and returns those that had to be paused.
        Before `admit`, so that what is paused has made all the steps that it was admitted for."""
        paused = []
        for seat in sorted(self._seats.values(), key=_by_age):
            missing = seat.pages_after(steps) - len(seat.pages)
            while seat.slot in self._seats and not self._make_room(missing):
                assert len(self._seats) > 1, "one rollout alone always fits"
                paused.append(self._pause(max(self._seats.values(), key=_by_age)))
            if seat.slot in self._seats:
                self._extend(seat, missing)
        return paused

    def admit(self, most_tokens: int, steps: int, *, only_paused: bool = False) -> list[Admission]:
        """Rollouts that take a seat now: paused ones, then waiting ones, with pages for so many steps. At most
        `most_tokens` have to be computed together, unless one rollout alone has more."""
        admitted: list[Admission] = []
        tokens = 0
        while self.paused or (self.waiting and not only_paused):
            is_resumed = bool(self.paused)
            job = self.paused[0].job if is_resumed else self.waiting[0]
            if job.is_cancelled and not is_resumed:
                self.waiting.popleft()
                continue
            if not is_resumed and not self._free_slots:
                break
            seat = self.paused[0] if is_resumed else Seat(self._free_slots[0], job, self._num_admitted)
            place = next((each for each in self._places.values() if each.is_for(job, self.loads)), None)
            if is_resumed or place is None:
                tokens += len(job.request.token_ids) + seat.steps
            if admitted and tokens > most_tokens:
                break
            taken = self._take_place(job, place, seat.pages_after(steps))
            if taken is None:
                break
            if is_resumed:
                self.paused.pop(0)
            else:
                self.waiting.popleft()
                self._free_slots.popleft()
                self._num_admitted += 1
            self._seat(seat, taken, steps)
            admitted.append(Admission(seat, place is None, is_resumed))
        return admitted

    def steps_ahead(self, most: int) -> int:
        """Steps that are of use to at least one rollout, `most` at most."""
        return min(most, max((seat.most_steps - seat.steps for seat in self._seats.values()), default=0))

    def advance(self, steps: int) -> list[Seat]:
        """Counts steps for all seats, and frees those whose answers are full, whether they ended before or not."""
        for seat in self._seats.values():
            seat.steps += steps
        return self.leave([seat for seat in self._seats.values() if seat.steps >= seat.most_steps])

    def leave(self, seats: Sequence[Seat]) -> list[Seat]:
        """Takes rollouts out that have ended, seated or paused; their slots and pages may be taken again at once."""
        for seat in seats:
            if seat in self.paused:
                self.paused.remove(seat)
            else:
                self._unseat(seat)
            self._free_slots.append(seat.slot)
            seat.place.num_missing -= 1
            self._free_if_unused(seat.place)
        return list(seats)

    def drop_cancelled(self) -> None:
        """Frees the slots and pages of jobs that nobody waits for."""
        self.leave([seat for seat in (*self._seats.values(), *self.paused) if seat.job.is_cancelled])

    def release(self, name: str) -> None:
        """No further rollout of the prefix group of that name will come."""
        for place in [each for each in self._places.values() if each.group is not None and each.group.name == name]:
            place.num_missing = place.num_seated + sum(seat.place is place for seat in self.paused)
            self._free_if_unused(place)

    def is_under_way(self, seat: Seat) -> bool:
        """Whether it is still this rollout that occupies the slot."""
        return self._seats.get(seat.slot) is seat or seat in self.paused

    def _pause(self, seat: Seat) -> Seat:
        self._unseat(seat)
        self._free_if_unused(seat.place)
        self.paused = sorted([*self.paused, seat], key=_by_age)
        seat.job.num_pauses += 1
        return seat

    def _unseat(self, seat: Seat) -> None:
        del self._seats[seat.slot]
        self._free_pages.extend(seat.pages)
        seat.pages = []
        seat.place.num_seated -= 1

    def _seat(self, seat: Seat, place: Place, steps: int) -> None:
        seat.place = place
        self._seats[seat.slot] = seat
        self._changes |= {(seat.slot, number): page for number, page in enumerate(place.pages)}
        self._extend(seat, seat.pages_after(steps))

    def _take_pages(self, count: int) -> list[int]:
        """Those that were given back first."""
        return [self._free_pages.popleft() for _ in range(count)]

    def _extend(self, seat: Seat, count: int) -> None:
        first = len(seat.place.pages) + len(seat.pages)
        new = self._take_pages(count)
        seat.pages += new
        self._changes |= {(seat.slot, first + number): page for number, page in enumerate(new)}

    def _take_place(self, job: Job, place: Place | None, own_pages: int) -> Place | None:
        """The job's place, with one seat more, if there are pages for it and for the rollout itself."""
        prompt_pages = 0 if place is not None else pages_for(len(job.request.token_ids))
        idle = sum(len(each.pages) for each in self._places.values() if each.num_seated == 0 and each is not place)
        if len(self._free_pages) + idle < prompt_pages + own_pages + reserved_pages(len(self._seats)):
            return None
        if place is not None:
            place.num_seated += 1  # so that its pages are not given away
        self._make_room(prompt_pages + own_pages)
        if place is None:
            place = self._new_place(job, prompt_pages)
            place.num_seated = 1
        return place

    def _new_place(self, job: Job, num_pages: int) -> Place:
        if not self._free_places:
            self._free_idle_place()
        group = job.request.prefix_group
        pages = self._take_pages(num_pages)
        place = Place(self._free_places.popleft(), job.request.token_ids, group, self.loads, pages)
        place.num_missing = 1 if group is None else group.size
        self._places[place.index] = place
        return place

    def _make_room(self, count: int) -> bool:
        """Whether so many pages are free, once unused prompts have given up theirs."""
        while len(self._free_pages) < count and self._free_idle_place():
            pass
        return len(self._free_pages) >= count

    def _free_idle_place(self) -> bool:
        """Gives up the oldest prompt that no seated rollout reads; False if there is none."""
        idle = next((each for each in self._places.values() if each.num_seated == 0), None)
        if idle is not None:
            self._free(idle)
        return idle is not None

    def _free_if_unused(self, place: Place) -> None:
        is_old = place.loads != self.loads
        if place.num_seated == 0 and (place.num_missing <= 0 or is_old) and self._places.get(place.index) is place:
            self._free(place)

    def _free(self, place: Place) -> None:
        del self._places[place.index]
        self._free_places.append(place.index)
        self._free_pages.extend(place.pages)


_by_age = attrgetter("number")
