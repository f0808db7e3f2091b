"""Who sits in which slot: by hand, and against random ends."""

import random

import pytest

from podium.engine._cuda.roster import LEAST_BATCH, Roster, ladder, rung_for
from podium.records import Request


def groups(*sizes: int) -> list[Request]:
    return [Request(k, (1, 2), tuple(range(size))) for k, size in enumerate(sizes)]


def test_the_ladder_doubles_then_goes_up_evenly_and_holds_the_most() -> None:
    assert ladder(1) == (8,)
    assert ladder(65) == (8, 16, 32, 64, 128)
    assert ladder(300) == (8, 16, 32, 64, 128, 192, 256, 320)


def test_a_batch_takes_the_smallest_rung_that_holds_it() -> None:
    sizes = ladder(200)
    assert [rung_for(count, sizes) for count in (1, 8, 9, 64, 65, 129, 192)] == [8, 8, 16, 64, 128, 192, 192]
    assert sizes[0] == LEAST_BATCH


def test_a_group_that_does_not_fit_joins_bit_by_bit_and_computes_its_prompt_once() -> None:
    roster = Roster(groups(3, 2), num_slots=2, num_prompts=2, most_steps=9)
    seats, prompts = roster.admit(max_prompts=9)
    assert ([(seat.request, seat.sample) for seat in seats], prompts) == ([(0, 0), (0, 1)], [0])
    assert roster.admit(9) == ([], [])
    roster.leave([seats[1].slot])
    again, prompts = roster.admit(9)
    assert ([(seat.request, seat.sample) for seat in again], prompts) == ([(0, 2)], [])
    assert again[0].slot == seats[1].slot
    assert again[0].prompt == seats[0].prompt


def test_a_prompts_place_is_free_only_when_its_last_rollout_has_ended() -> None:
    roster = Roster(groups(2, 1), num_slots=4, num_prompts=1, most_steps=9)
    seats, prompts = roster.admit(9)
    assert prompts == [0]
    roster.leave([seats[0].slot])
    assert roster.admit(9) == ([], [])
    roster.leave([seats[1].slot])
    assert roster.admit(9)[1] == [1]


def test_no_more_prompts_at_a_time_than_allowed() -> None:
    roster = Roster(groups(1, 1, 1), num_slots=8, num_prompts=8, most_steps=9)
    assert [roster.admit(2)[1], roster.admit(2)[1], roster.admit(2)[1]] == [[0, 1], [2], []]


def test_answers_that_are_full_leave_without_being_asked() -> None:
    roster = Roster(groups(1, 1), num_slots=2, num_prompts=2, most_steps=5)
    roster.admit(1)
    assert roster.steps_ahead(4) == 4
    assert roster.advance(4) == []
    roster.admit(1)  # a younger one
    assert roster.steps_ahead(4) == 4  # which still has five to go
    [left] = roster.advance(4)
    assert left.request == 0
    assert roster.steps_ahead(4) == 1
    assert [seat.request for seat in roster.advance(1)] == [1]
    assert roster.is_done
    assert roster.steps_ahead(4) == 0


def test_a_slot_taken_again_is_not_mistaken_for_the_rollout_before() -> None:
    roster = Roster(groups(1, 1), num_slots=1, num_prompts=2, most_steps=9)
    [first], _ = roster.admit(9)
    roster.leave([first.slot])
    [second], _ = roster.admit(9)
    assert first.slot == second.slot
    assert not roster.is_seated(first)
    assert roster.is_seated(second)


@pytest.mark.parametrize("seed", range(5))
def test_every_rollout_sits_once_and_nobody_shares_a_slot(seed: int) -> None:
    draw = random.Random(seed)
    asked = groups(*(draw.randrange(1, 9) for _ in range(30)))
    roster = Roster(asked, num_slots=7, num_prompts=3, most_steps=20)
    sat = []
    while not roster.is_done:
        sat += [(seat.request, seat.sample) for seat in roster.admit(2)[0]]
        assert len(set(roster.slots)) == len(roster.slots) <= 7
        assert len({seat.request for seat in roster.seats}) == len({seat.prompt for seat in roster.seats}) <= 3
        roster.leave(draw.sample(roster.slots, draw.randrange(len(roster.slots) + 1)))
        roster.advance(roster.steps_ahead(4))
    assert sorted(sat) == [(k, sample) for k, request in enumerate(asked) for sample in range(len(request.seeds))]
