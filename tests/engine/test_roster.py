"""Who sits in which slot and on which pages: by hand, and against random ends."""

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.engine.cuda.roster import (
    LEAST_BATCH,
    PAGE,
    SPARE_PAGE,
    Admission,
    Roster,
    Seat,
    ladder,
    pages_for,
    reserved_pages,
    rung_for,
)
from podium.engine.decoding.queue import Job
from podium.records import PrefixGroup, Request, Sampling

MANY = 1000
STEPS = 4
"""Steps that are queued at a time."""


def groups(*sizes: int, most: int = 10, prompt: int = 2) -> list[Job]:
    """The rollouts of groups of these sizes, with up to `most` tokens each, for prompts of that length."""
    sampling = Sampling(max_new_tokens=most)
    named = [PrefixGroup(str(k), size) for k, size in enumerate(sizes)]
    return [Job(Request((1,) * prompt, sampling, seed, group)) for group in named for seed in range(group.size)]


def a_roster(jobs: list[Job], num_slots: int, num_pages: int = MANY) -> Roster:
    """`num_pages` beside the spare page."""
    return Roster(num_slots, num_pages + 1, deque(jobs))


def admit(roster: Roster, most_tokens: int = MANY) -> list[Admission]:
    return roster.admit(most_tokens, STEPS)


def name(job: Job) -> tuple[str, int]:
    """Group and sample."""
    return job.request.prefix_group.name, job.request.seed  # type: ignore[union-attr]


def who(admitted: list[Admission]) -> list[tuple[str, int]]:
    return [name(each.seat.job) for each in admitted]


def computed(admitted: list[Admission]) -> list[str]:
    """Groups whose prompts have to be computed."""
    return [name(each.seat.job)[0] for each in admitted if each.is_place_new]


def turn(roster: Roster, steps: int = STEPS) -> tuple[list[Seat], list[Admission], list[Seat]]:
    """One turn of a decoder: (paused, admitted, full)."""
    paused = roster.grow(steps)
    admitted = [] if paused else roster.admit(MANY, steps)
    return paused, admitted, roster.advance(roster.steps_ahead(steps))


def test_the_ladder_doubles_then_goes_up_evenly_and_holds_the_most() -> None:
    assert ladder(1) == (8,)
    assert ladder(65) == (8, 16, 32, 64, 128)
    assert ladder(300) == (8, 16, 32, 64, 128, 192, 256, 320)


def test_a_batch_takes_the_smallest_rung_that_holds_it() -> None:
    sizes = ladder(200)
    assert [rung_for(count, sizes) for count in (1, 8, 9, 64, 65, 129, 192)] == [8, 8, 16, 64, 128, 192, 192]
    assert sizes[0] == LEAST_BATCH


def test_tokens_fill_pages_and_the_spare_page_is_never_handed_out() -> None:
    assert [pages_for(tokens) for tokens in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]
    assert sorted([*Roster(1, 9)._free_pages, SPARE_PAGE]) == list(range(9))


def test_a_group_that_does_not_fit_joins_bit_by_bit_and_computes_its_prompt_once() -> None:
    roster = a_roster(groups(3, 2), 2)
    admitted = admit(roster)
    assert (who(admitted), computed(admitted)) == ([("0", 0), ("0", 1)], ["0"])
    assert admit(roster) == []
    [_, second] = roster.seats
    roster.leave([second])
    again = admit(roster)
    assert (who(again), computed(again)) == ([("0", 2)], [])
    assert again[0].seat.slot == second.slot
    assert again[0].seat.place is second.place


def test_pages_of_a_prompt_in_use_are_free_only_when_its_last_rollout_has_ended() -> None:
    roster = a_roster(groups(2, 1), 4, num_pages=4)
    assert computed(admit(roster)) == ["0"]
    first, second = roster.seats
    roster.leave([first])
    assert admit(roster) == []
    roster.leave([second])
    assert computed(admit(roster)) == ["1"]


def test_a_prompt_that_waits_for_the_rest_of_its_group_gives_its_pages_to_one_that_needs_them() -> None:
    first, second, third, other = groups(3, 1)
    roster = a_roster([first], 4, num_pages=2)
    admit(roster)
    roster.leave(roster.seats)
    roster.waiting.append(second)
    assert computed(admit(roster)) == []  # the group's prompt is still there
    roster.leave(roster.seats)
    roster.waiting.extend([other, third])
    admitted = admit(roster)
    assert (who(admitted), computed(admitted)) == ([("1", 0)], ["1"])
    roster.leave(roster.seats)
    assert computed(admit(roster)) == ["0"]  # computed again


def test_a_released_group_gives_its_pages_back() -> None:
    first, _, other = groups(2, 1)
    roster = a_roster([first], 4, num_pages=3)
    [seat] = [each.seat for each in admit(roster)]
    roster.release("0")
    roster.release("unknown")
    roster.waiting.append(other)
    assert admit(roster) == []  # the first rollout still reads it
    roster.leave([seat])
    assert len(roster._free_pages) == 3
    assert computed(admit(roster)) == ["1"]


def test_a_prompt_computed_with_older_weights_is_not_used_again() -> None:
    first, second = groups(2)
    roster = a_roster([first], 4)
    admit(roster)
    roster.loads += 1
    roster.waiting.append(second)
    assert computed(admit(roster)) == ["0"]
    assert roster.seats[0].place is not roster.seats[1].place


def test_cancelled_jobs_leave_their_slots_their_pages_and_the_queue() -> None:
    jobs = groups(2, 2)
    roster = a_roster(jobs, 2, num_pages=5)
    admit(roster)
    jobs[0].is_cancelled = jobs[2].is_cancelled = True
    roster.drop_cancelled()
    assert [name(seat.job) for seat in roster.seats] == [("0", 1)]
    assert who(admit(roster)) == [("1", 1)]


def test_no_more_tokens_at_a_time_than_allowed_but_a_long_prompt_goes_alone() -> None:
    roster = a_roster(groups(1, 1, 1, prompt=30), 8)
    assert [computed(admit(roster, 70)) for _ in range(3)] == [["0", "1"], ["2"], []]
    roster = a_roster(groups(1, 1, prompt=30), 8)
    assert [computed(admit(roster, 7)) for _ in range(3)] == [["0"], ["1"], []]


def test_answers_that_are_full_leave_without_being_asked() -> None:
    """Each after as many steps as its own sampling allows; the first token takes none."""
    first, second = groups(1, 1, most=6, prompt=5)
    roster = a_roster([first, second], 2)
    admit(roster, 5)
    assert roster.steps_ahead(4) == 4
    assert roster.advance(4) == []
    admit(roster, 5)  # a younger one
    assert roster.steps_ahead(4) == 4  # which still has five to go
    [left] = roster.advance(4)
    assert left.job is first
    assert roster.steps_ahead(4) == 1
    assert [seat.job for seat in roster.advance(1)] == [second]
    assert roster.is_done
    assert roster.steps_ahead(4) == 0


def test_a_slot_taken_again_is_not_mistaken_for_the_rollout_before() -> None:
    roster = a_roster(groups(1, 1), 1)
    [first] = [each.seat for each in admit(roster)]
    roster.leave([first])
    [second] = [each.seat for each in admit(roster)]
    assert first.slot == second.slot
    assert not roster.is_under_way(first)
    assert roster.is_under_way(second)


def test_the_youngest_is_paused_and_goes_on_before_any_new_job() -> None:
    """Two prompts and two rollouts of two pages each need six pages, and there are five."""
    jobs = groups(1, 1, 1, most=2 * PAGE)
    roster = a_roster(jobs, 3, num_pages=5)
    _, admitted, _ = turn(roster, PAGE)
    assert who(admitted) == [("0", 0), ("1", 0)]  # a page stays free while others are seated
    first, second = roster.seats
    paused, admitted, _ = turn(roster, PAGE // 2)
    assert (paused, admitted) == ([second], [])
    assert (second.pages, second.steps, second.job.num_pauses) == ([], PAGE, 1)
    assert roster.is_under_way(second)
    assert turn(roster, 1)[1] == []  # there is a free page, not enough to go on, and the third job waits behind it
    roster.leave([first])
    [resumed] = roster.admit(MANY, 1)
    assert (resumed.seat, resumed.is_resumed, resumed.is_place_new) == (second, True, False)
    assert (len(second.pages), second.steps) == (2, PAGE)
    roster.leave([second])
    assert [each.seat.job for each in admit(roster)] == [jobs[2]]
    assert [job.num_pauses for job in jobs] == [0, 1, 0]


def test_a_paused_rollout_can_be_cancelled_and_can_turn_out_to_have_ended() -> None:
    for is_cancelled in (True, False):
        roster = a_roster(groups(1, 1, most=2 * PAGE), 3, num_pages=5)
        turn(roster, PAGE)
        [paused] = turn(roster, PAGE // 2)[0]
        if is_cancelled:
            paused.job.is_cancelled = True
            roster.drop_cancelled()
        else:
            assert roster.leave([paused]) == [paused]
        assert not roster.paused
        assert len(roster._free_slots) == 3 - len(roster.seats)


def test_the_table_of_a_slot_begins_with_the_prompts_pages() -> None:
    roster = a_roster(groups(2, most=2 * PAGE, prompt=PAGE + 1), 2)
    admit(roster)
    roster.advance(PAGE)
    roster.grow(1)
    table = roster.take_changes()
    for seat in roster.seats:
        pages = [*seat.place.pages, *seat.pages]
        assert (len(seat.place.pages), len(seat.pages)) == (2, 2)
        assert [table[seat.slot, number] for number in range(4)] == pages
    assert len(table) == 8
    assert roster.take_changes() == {}


def assert_pages_in_order(roster: Roster, num_pages: int) -> None:
    """Each page has one owner, a prompt or a rollout, or is free; none is lost."""
    owners = [*roster._places.values(), *roster._seats.values()]
    owned = [page for each in owners for page in each.pages]
    assert Counter([*owned, *roster._free_pages]) == Counter(range(1, num_pages + 1))
    assert all(not seat.pages for seat in roster.paused)
    for seat in roster.seats:
        assert roster._places[seat.place.index] is seat.place
        assert len(seat.pages) >= pages_for(min(seat.steps, seat.most_steps + 1))
    for place in roster._places.values():
        assert place.num_seated == sum(seat.place is place for seat in roster.seats)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3 * PAGE), st.integers(1, 3 * PAGE)), max_size=12),
    num_slots=st.integers(1, 9),
    spare=st.integers(0, 20),
    steps=st.sampled_from([1, 4, 50]),
    data=st.data(),
)
def test_no_page_has_two_owners_none_is_lost_and_all_jobs_end_in_order(sizes, num_slots, spare, steps, data) -> None:
    jobs = [
        Job(Request((k,) * prompt, Sampling(max_new_tokens=most), seed, PrefixGroup(str(k), size)))
        for k, (size, prompt, most) in enumerate(sizes)
        for seed in range(size)
    ]
    most = max((pages_for(prompt) + pages_for(answer) for _, prompt, answer in sizes), default=1)
    roster, num_pages = a_roster(list(jobs), num_slots, most + spare), most + spare
    begun: list[Job] = []
    for _ in range(5000):
        if roster.is_done:
            break
        slots = {seat.slot for seat in (*roster.seats, *roster.paused)}
        oldest = min(roster.seats, key=lambda seat: seat.number, default=None)
        paused, admitted, _ = turn(roster, steps)
        assert oldest not in paused, "the oldest always goes on"
        begun += [each.seat.job for each in admitted if not each.is_resumed]
        assert not any(each.seat.slot in slots for each in admitted if not each.is_resumed)
        assert_pages_in_order(roster, num_pages)
        if data.draw(st.integers(0, 4)) == 0 and roster.seats:
            roster.leave(data.draw(st.lists(st.sampled_from(roster.seats), unique=True)))
        if data.draw(st.integers(0, 30)) == 0:
            roster.loads += 1
        assert_pages_in_order(roster, num_pages)
    assert roster.is_done
    assert begun == jobs
    for k in range(len(sizes)):
        roster.release(str(k))
    assert len(roster._free_pages) == num_pages


def test_pages_stay_free_for_growth_while_others_are_seated() -> None:
    assert [reserved_pages(count) for count in (0, 1, 8, 9)] == [0, 1, 1, 2]


@pytest.mark.parametrize("num_pages", [2, 3])
def test_a_rollout_alone_gets_every_page(num_pages: int) -> None:
    roster = a_roster(groups(1, most=(num_pages - 1) * PAGE), 4, num_pages)
    for _ in range(num_pages * PAGE):
        assert turn(roster)[0] == []
    assert roster.is_done
