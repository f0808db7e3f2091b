import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from podium.data.build import OrderedData, Source, make_pools
from podium.errors import InputError
from podium.records import Plan, Row, RunState
from podium.settings.tables import Settings
from tests.builders import make_group
from tests.data.test_order import CharacterTokenizer, make_source


def make_data(*sources: Source, seed: int = 0, **plan: Any) -> OrderedData:
    numbers = {"steps": 1000, "prompts_per_step": 1, "rollouts_per_prompt": 2} | plan
    return OrderedData(sources, CharacterTokenizer(), Plan(**numbers), seed, fits=5)


def source(name: str, num_rows: int, long: Sequence[int] = (), **share: Any) -> Source:
    """Source "a" has the rows a0, a1, …; those in `long` are too long."""
    texts = [f"{name}{n}{' is too long' if n in long else ''}" for n in range(num_rows)]
    return make_source([Row.from_text(text, source=name) for text in texts], name, **share)


def drawn(data: OrderedData, count: int, start: int = 0) -> list[str]:
    return [prompt.question for prompt in data.draw(RunState(next_ordinal=start), count)]


def by_source(texts: Sequence[str]) -> Counter[str]:
    return Counter(text[0] for text in texts)


def test_without_shares_a_pass_has_every_row_of_every_source_once() -> None:
    data = make_data(source("a", 3), source("b", 2))
    assert sorted(drawn(data, 5)) == ["a0", "a1", "a2", "b0", "b1"]


def test_weights_are_shares_of_the_drawn_prompts() -> None:
    data = make_data(source("a", 90, weight=1), source("b", 10, weight=3))
    # 100 rows in all: a quarter and three quarters of each pass
    assert by_source(drawn(data, 100)) == {"a": 25, "b": 75}
    assert by_source(drawn(data, 100, start=100)) == {"a": 25, "b": 75}


def test_weights_count_prompts_that_are_kept() -> None:
    # a keeps 2 of 8, b all 4: 6 prompts a pass, half of them each
    data = make_data(source("a", 8, range(6), weight=0.5), source("b", 4, weight=0.5))
    assert by_source(drawn(data, 6)) == {"a": 3, "b": 3}
    assert data.num_steps == 1000
    assert make_data(source("a", 8, [0], weight=1), source("b", 4, weight=1), epochs=2).num_steps == 2 * 11


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1, 1, 1), {"a": 4, "b": 3, "c": 3}),  # 10/3 each: the first gets the one that is left
        ((1, 2, 2), {"a": 2, "b": 4, "c": 4}),
        ((0.0001, 1, 1), {"a": 1, "b": 5, "c": 5}),  # nobody is left out of a pass
    ],
)
def test_shares_that_are_no_whole_numbers_are_rounded_so_that_none_is_lost(weights: Any, expected: Any) -> None:
    sizes = (4, 3, 3)
    sources = [source(name, size, weight=w) for name, size, w in zip("abc", sizes, weights, strict=True)]
    data = make_data(*sources)
    assert by_source(drawn(data, sum(expected.values()))) == expected


def test_a_weighted_source_goes_through_its_rows_evenly_over_the_passes() -> None:
    data = make_data(source("a", 7, weight=1), source("b", 5, weight=2))
    # 12 prompts a pass, 4 of a and 8 of b; after 35 passes each of a's 7 rows was drawn 20 times, b's 5 rows 56 times
    counts = Counter(drawn(data, 12 * 35))
    assert {text: count for text, count in counts.items() if text[0] == "a"} == {f"a{n}": 20 for n in range(7)}
    assert {text: count for text, count in counts.items() if text[0] == "b"} == {f"b{n}": 56 for n in range(5)}
    some = Counter(drawn(data, 12 * 4))
    assert max(some[f"a{n}"] for n in range(7)) - min(some[f"a{n}"] for n in range(7)) <= 1


def test_an_integer_is_a_number_of_rows_and_the_same_ones_each_pass() -> None:
    data = make_data(source("a", 50, rows=1), source("b", 50, rows=4), epochs=2)
    assert data.num_steps == 10
    first, second = drawn(data, 5), drawn(data, 5, start=5)
    assert by_source(first) == {"a": 1, "b": 4}
    assert sorted(first) == sorted(second)
    assert len(set(first)) == 5


def test_a_float_is_a_share_of_the_rows() -> None:
    assert sorted(drawn(make_data(source("a", 4, rows=1.0), epochs=1), 99)) == ["a0", "a1", "a2", "a3"]
    half = drawn(make_data(source("a", 10, rows=0.5), epochs=1), 99)
    assert len(half) == len(set(half)) == 5
    assert len(drawn(make_data(source("a", 10, rows=0.001), epochs=1), 99)) == 1


def test_more_than_all_repeats_rows() -> None:
    counts = Counter(drawn(make_data(source("a", 4, rows=2.5), epochs=1), 99))
    assert sorted(counts.values()) == [2, 2, 3, 3]
    assert sorted(counts) == ["a0", "a1", "a2", "a3"]


def test_rows_are_chosen_among_those_that_are_not_too_long() -> None:
    data = make_data(source("a", 4, [0, 3], rows=2), epochs=1)
    assert sorted(drawn(data, 99)) == ["a1", "a2"]


def test_a_source_with_rows_stands_beside_one_that_is_taken_whole() -> None:
    data = make_data(source("a", 10, rows=2), source("b", 3, [1]), epochs=1)
    assert by_source(drawn(data, 99)) == {"a": 2, "b": 2}
    assert data.num_steps == 4


MIXTURES = {
    "weights": [source("a", 7, weight=1), source("b", 5, weight=2.5)],
    "rows": [source("a", 7, rows=3), source("b", 5, rows=1.7)],
}


@pytest.mark.parametrize("sources", MIXTURES.values(), ids=MIXTURES)
def test_the_order_depends_on_seed_and_epoch_alone(sources: list[Source]) -> None:
    whole = drawn(make_data(*sources), 60)
    assert drawn(make_data(*sources, prompts_per_step=7), 60) == whole
    assert drawn(make_data(*sources, seed=1), 60) != whole
    data = make_data(*sources)
    for start in (1, 11, 12, 13, 40):  # a resume from any frontier, also by objects that have drawn nothing before
        assert drawn(data, 60 - start, start) == drawn(make_data(*sources), 60 - start, start) == whole[start:]


def test_the_order_of_a_mixture_is_the_same_on_every_machine_and_release() -> None:
    # a change here breaks the resume of every run there is
    data = make_data(source("a", 4, weight=1), source("b", 4, weight=3))
    assert " ".join(drawn(data, 8)) == "a0 b0 a1 b1 b2 b3 b0 b2"


def test_a_row_that_is_repeated_is_retired_as_one() -> None:
    data = make_data(source("a", 2, rows=3.0), retire_pass_rate=0.5)
    prompt = data.draw(RunState(), 1)[0]
    solved = replace(make_group((1.2, 1.2), prompt=prompt), correct=(True, True))
    state = data.advance(RunState(), [solved])
    assert len(state.retired) == 1
    assert {p.question for p in data.draw(state, 20)} == {"a0", "a1"} - {prompt.question}


def test_rows_that_are_never_drawn_do_not_keep_a_run_going() -> None:
    data = make_data(source("a", 9, rows=1), retire_pass_rate=0.5)
    only = int(drawn(data, 1)[0][1])
    assert data.end(RunState(retired=(only,))) is not None
    assert data.draw(RunState(retired=(only,)), 1) == []


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        (
            [source("a", 1), source("b", 3, rows=4)],
            "data[1].rows = 4: b has 3 rows that are not too long; give fewer, or a share above 1.0 to repeat rows",
        ),
        ([source("a", 1), source("b", 0, rows=0.5)], "data[1].rows = 0.5: b has no row that is not too long"),
        (
            [source("a", 1, weight=1), source("b", 0, weight=2)],
            "data[1].weight = 2.0: b has no row that is not too long",
        ),
    ],
)
def test_more_than_there_is_is_refused(sources: list[Source], complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        make_pools(sources, [True] * 10, seed=0)
    assert str(caught.value) == complaint


ONE = {"name": "arithmetic"}


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        (
            [ONE | {"weight": 1, "rows": 2}, ONE],
            "data[0].weight and data[0].rows both say how much is drawn; remove one",
        ),
        ([ONE | {"weight": 1}, ONE], "data[1] has no weight and data[0] has one; give each table one, or none"),
        (
            [ONE | {"rows": 3}, ONE | {"weight": 1}],
            "data[0] has no weight and data[1] has one; give each table one, or none",
        ),
        (
            [ONE | {"weight": 1}],
            "data[0].weight has no effect on the only table; remove it, or add another [[data]] table",
        ),
        ([ONE | {"weight": 0}, ONE | {"weight": 1}], "data.0.weight = 0: input should be greater than 0"),
        ([ONE | {"weight": -1}, ONE], "data.0.weight = -1: input should be greater than 0"),
        ([ONE | {"weight": "much"}], "data.0.weight = 'much': input should be a valid number"),
        *(
            ([ONE | {"rows": bad}], f"data.0.rows = {bad!r}: give a number of rows such as 500, or a share")
            for bad in (0, -1, 0.0, -0.5, True, "all", float("inf"), float("nan"), [1])
        ),
    ],
)
def test_a_mixture_that_makes_no_sense_is_refused(tables: list[Any], complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings.from_dict({"data": tables, "reward": [{"name": "arithmetic"}]})
    assert str(caught.value).startswith(complaint)


@pytest.mark.parametrize("key", ["weight", "rows"])
def test_evaluation_takes_every_row_once(key: str) -> None:
    with pytest.raises(InputError) as caught:
        Settings.from_dict({"eval": {"data": [ONE, ONE | {key: 1}]}, "reward": [{"name": "arithmetic"}]})
    assert str(caught.value) == (
        f"eval.data[1].{key} has no effect: evaluation takes every row once; max_rows takes fewer"
    )


def test_one_row_and_all_rows_are_not_the_same_and_stay_so_when_settings_are_saved() -> None:
    settings = Settings.from_dict({"data": [ONE | {"rows": 1}, ONE | {"rows": 1.0}]})
    assert [type(table.rows) for table in settings.data] == [int, float]
    again = Settings.from_dict(tomllib.loads(settings.to_toml()))
    assert [type(table.rows) for table in again.data] == [int, float]
