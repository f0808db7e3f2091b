"""Two ranks that share a step do what one process does with all of it."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.errors import RankError, TokenMismatchError
from podium.trainer import on_any_rank
from tests.trainer.ranks import OBJECTIVES, RARE, Example, Pair, single_steps, update

SMALL = Example([[(3, 4, 5), (6, 7)], [(8,), (9, 3, 4, 5)]], [[1.0, -0.5], [-1.0, 0.25]])
"""Two documents a rank, in one batch each."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    yield made
    made.close()


@st.composite
def examples(draw: st.DrawFn) -> Example:
    ids = st.lists(st.integers(0, RARE), min_size=1, max_size=12).map(tuple)
    answers = draw(st.lists(st.lists(ids, min_size=1, max_size=4), min_size=1, max_size=4))
    objective = draw(st.sampled_from(sorted(OBJECTIVES)))
    number = st.floats(-2, 2).map(lambda value: round(value, 3))
    if objective == "KL in the advantages":  # where 0 would become 1e-17 or -1e-17, and a clip bound asks for the sign
        number = number.filter(lambda value: value != 0)
    advantages = [[draw(number) for _ in group] for group in answers]
    return Example(answers, advantages, draw(st.integers(1, 60)), objective)


def assert_same_step(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-9, abs=1e-9)
    assert found["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        other = found["gradients"][name]
        assert (gradient is None) == (other is None), name
        if gradient is not None:
            assert torch.allclose(torch.tensor(other), torch.tensor(gradient), rtol=0, atol=1e-9), name


@settings(max_examples=80, deadline=None)
@given(example=examples())
def test_gradients_and_metrics_are_those_of_one_process(pair: Pair, example: Example) -> None:
    found, expected = pair(update, example), update(example)
    assert found[0] == found[1]  # bit for bit: every rank makes the same update
    assert_same_step(found[0], expected)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_adds_up(pair: Pair, objective: str) -> None:
    example = replace(SMALL, objective=objective)
    found, expected = pair(update, example), update(example)
    assert max(abs(value) for row in expected["gradients"]["head"] for value in row) > 1e-3
    for one in found:
        assert_same_step(one, expected)


def test_a_parameter_without_a_gradient_on_one_rank_gets_the_other_ones(pair: Pair) -> None:
    answers = [[(RARE, 4, 5), (6, 7)], [(8,), (9, 3, 4, 5)]]
    example = replace(SMALL, answers=answers, objective="KL in the loss")  # no clip bound takes the gradient away
    [one, other], expected = pair(update, example), update(example)
    assert update(SMALL)["gradients"]["rare"] is None  # without the token there is none
    assert any(expected["gradients"]["rare"])
    for found in (one, other):
        assert_same_step(found, expected)
        assert found["gradients"]["unused"] is None


def test_out_of_memory_on_one_rank_cuts_the_batches_of_both(pair: Pair) -> None:
    found = pair(update, replace(SMALL, trouble="memory"))
    assert [one["halvings"] for one in found] == [1, 1]
    for one in found:
        assert_same_step(one, update(SMALL))


def test_a_single_document_that_does_not_fit_stops_both(pair: Pair) -> None:
    [other, mine] = pair(update, replace(SMALL, trouble="no memory"))
    assert isinstance(mine, torch.OutOfMemoryError)
    assert isinstance(other, RankError)


def test_a_number_that_is_not_finite_on_one_rank_is_seen_by_both(pair: Pair) -> None:
    for found in pair(update, replace(SMALL, trouble="nan")):
        assert not torch.tensor(found["gradients"]["head"]).isfinite().all()
        assert found["metrics"]["loss/total"] != found["metrics"]["loss/total"]


def test_an_error_on_one_rank_stops_the_other_at_once_and_leaves_them_in_step(pair: Pair) -> None:
    started = time.monotonic()
    [other, mine] = pair(update, replace(SMALL, trouble="ids"))
    assert time.monotonic() - started < 100  # alone it would wait for minutes
    assert isinstance(mine, TokenMismatchError)
    assert isinstance(other, RankError)
    assert_same_step(pair(update, SMALL)[0], update(SMALL))


@pytest.mark.parametrize("lora", [False, True])
def test_the_trainer_itself_steps_with_two_ranks_as_with_one(pair: Pair, lora: bool) -> None:
    [one, other], alone = pair(single_steps, lora), single_steps(lora)
    assert one == other  # bit for bit, weights too
    for found, expected in zip(one, alone, strict=True):
        passes = (found["metrics"].pop("pack/batches"), expected["metrics"].pop("pack/batches"))
        assert passes[0] >= passes[1] > 0
        assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
        for name, gradient in expected["gradients"].items():
            assert torch.allclose(torch.tensor(found["gradients"][name]), torch.tensor(gradient), atol=1e-6), name
    assert [step["metrics"]["optim/skipped"] for step in one] == [0, 0, 0]
    assert one[-1]["weights"] != one[0]["weights"]


def test_a_rank_whose_process_dies_is_an_error_to_the_other(tmp_path) -> None:
    pair = Pair(tmp_path)
    try:
        assert all(isinstance(result, dict) for result in pair(update, SMALL))
        pair.processes[1].kill()
        pair.start(0, update, SMALL, 0, 2)
        assert isinstance(pair.result(0), RuntimeError)
    finally:
        pair.close()


def test_one_process_asks_nobody() -> None:
    assert on_any_rank(True, torch.device("cpu"))
    assert not on_any_rank(False, torch.device("cpu"))
