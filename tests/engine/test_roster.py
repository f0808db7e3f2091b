"""Who sits in which slot: by hand, and against random ends."""

import random
from collections import deque

import pytest

from podium.engine.cuda.roster import LEAST_BATCH, Place, Roster, Seat, ladder, rung_for
from podium.engine.decoding.queue import Job
from podium.records import PrefixGroup, Request, Sampling


def groups(*sizes: int, most: int = 10) -> list[Job]:
    """The rollouts of groups of these sizes, with up to `most` tokens each."""
    sampling = Sampling(max_new_tokens=most)
    named = [PrefixGroup(str(k), size) for k, size in enumerate(sizes)]
    return [Job(Request((1, 2), sampling, seed, group)) for group in named for seed in range(group.size)]


def a_roster(jobs: list[Job], num_slots: int, num_places: int) -> Roster:
    return Roster(num_slots, num_places, deque(jobs))


def who(seats: list[Seat]) -> list[tuple[str, int]]:
    """Group and sample of each seat."""
    return [(seat.job.request.prefix_group.name, seat.job.request.seed) for seat in seats]  # type: ignore[union-attr]


def names(places: list[Place]) -> list[str]:
    return [place.group.name for place in places]  # type: ignore[union-attr]


def test_the_ladder_doubles_then_goes_up_evenly_and_holds_the_most() -> None:
    assert ladder(1) == (8,)
    assert ladder(65) == (8, 16, 32, 64, 128)
    assert ladder(300) == (8, 16, 32, 64, 128, 192, 256, 320)


def test_a_batch_takes_the_smallest_rung_that_holds_it() -> None:
    sizes = ladder(200)
    assert [rung_for(count, sizes) for count in (1, 8, 9, 64, 65, 129, 192)] == [8, 8, 16, 64, 128, 192, 192]
    assert sizes[0] == LEAST_BATCH


def test_a_group_that_does_not_fit_joins_bit_by_bit_and_computes_its_prompt_once() -> None:
    roster = a_roster(groups(3, 2), 2, 2)
    seats, places = roster.admit(max_prompts=9)
    assert (who(seats), names(places)) == ([("0", 0), ("0", 1)], ["0"])
    assert roster.admit(9) == ([], [])
    roster.leave([seats[1].slot])
    again, places = roster.admit(9)
    assert (who(again), names(places)) == ([("0", 2)], [])
    assert again[0].slot == seats[1].slot
    assert again[0].place is seats[0].place


def test_a_place_in_use_is_free_only_when_its_last_rollout_has_ended() -> None:
    roster = a_roster(groups(2, 1), 4, 1)
    seats, places = roster.admit(9)
    assert names(places) == ["0"]
    roster.leave([seats[0].slot])
    assert roster.admit(9) == ([], [])
    roster.leave([seats[1].slot])
    assert names(roster.admit(9)[1]) == ["1"]


def test_a_place_that_waits_for_the_rest_of_its_group_is_given_to_a_prompt_that_needs_one() -> None:
    first, second, third, other = groups(3, 1)
    roster = a_roster([first], 4, 1)
    roster.leave([seat.slot for seat in roster.admit(9)[0]])
    roster.waiting.append(second)
    assert roster.admit(9)[1] == []  # the group's prompt is still there
    roster.leave(roster.slots)
    roster.waiting.extend([other, third])
    seats, places = roster.admit(9)
    assert (who(seats), names(places)) == ([("1", 0)], ["1"])
    roster.leave(roster.slots)
    assert names(roster.admit(9)[1]) == ["0"]  # computed again


def test_a_released_group_gives_its_place_back() -> None:
    first, _, other = groups(2, 1)
    roster = a_roster([first], 4, 1)
    [seat] = roster.admit(9)[0]
    roster.release("0")
    roster.release("unknown")
    roster.waiting.append(other)
    assert roster.admit(9) == ([], [])  # the first rollout still reads it
    roster.leave([seat.slot])
    assert names(roster.admit(9)[1]) == ["1"]


def test_a_prompt_computed_with_older_weights_is_not_used_again() -> None:
    first, second = groups(2)
    roster = a_roster([first], 4, 2)
    roster.admit(9)
    roster.loads += 1
    roster.waiting.append(second)
    [seat], places = roster.admit(9)
    assert names(places) == ["0"]
    assert seat.place is places[0]


def test_cancelled_jobs_leave_their_slots_and_the_queue() -> None:
    jobs = groups(2, 2)
    roster = a_roster(jobs, 2, 2)
    roster.admit(9)
    jobs[0].is_cancelled = jobs[2].is_cancelled = True
    roster.drop_cancelled()
    assert who(roster.seats) == [("0", 1)]
    assert who(roster.admit(9)[0]) == [("1", 1)]


def test_no_more_prompts_at_a_time_than_allowed() -> None:
    roster = a_roster(groups(1, 1, 1), 8, 8)
    assert [names(roster.admit(2)[1]) for _ in range(3)] == [["0", "1"], ["2"], []]


def test_answers_that_are_full_leave_without_being_asked() -> None:
    """Each after as many steps as its own sampling allows; the first token takes none."""
    first, second = groups(1, 1, most=6)
    roster = a_roster([first, second], 2, 2)
    roster.admit(1)
    assert roster.steps_ahead(4) == 4
    assert roster.advance(4) == []
    roster.admit(1)  # a younger one
    assert roster.steps_ahead(4) == 4  # which still has five to go
    [left] = roster.advance(4)
    assert left.job is first
    assert roster.steps_ahead(4) == 1
    assert [seat.job for seat in roster.advance(1)] == [second]
    assert roster.is_done
    assert roster.steps_ahead(4) == 0


def test_a_slot_taken_again_is_not_mistaken_for_the_rollout_before() -> None:
    roster = a_roster(groups(1, 1), 1, 2)
    [first], _ = roster.admit(9)
    roster.leave([first.slot])
    [second], _ = roster.admit(9)
    assert first.slot == second.slot
    assert not roster.is_seated(first)
    assert roster.is_seated(second)


@pytest.mark.parametrize("seed", range(5))
def test_every_rollout_sits_once_and_nobody_shares_a_slot(seed: int) -> None:
    draw = random.Random(seed)
    asked = groups(*(draw.randrange(1, 9) for _ in range(30)), most=21)
    roster = a_roster(list(asked), 7, 3)
    sat = []
    while not roster.is_done:
        sat += [seat.job for seat in roster.admit(2)[0]]
        assert len(set(roster.slots)) == len(roster.slots) <= 7
        groups_seated = {seat.job.request.prefix_group for seat in roster.seats}
        assert len(groups_seated) == len({seat.place.index for seat in roster.seats}) <= 3
        roster.leave(draw.sample(roster.slots, draw.randrange(len(roster.slots) + 1)))
        roster.advance(roster.steps_ahead(4))
    assert sat == asked
