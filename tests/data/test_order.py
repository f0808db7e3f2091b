from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from podium.data.build import OrderedData, Source
from podium.errors import InputError
from podium.records import Group, Plan, Prompt, Row, RunState
from podium.settings.sections import DataSource
from tests.builders import make_group


class CharacterTokenizer:
    """No template, one token a character."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[ord(character) for character in text])

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def make_source(rows: Sequence[Row], name: str = "rows", /, **table: Any) -> Source:
    return Source(DataSource(name=name, **table), rows)


def order(*sources: Source, fits: int = 9, seed: int = 0, system: str | None = None) -> OrderedData:
    return OrderedData(sources, CharacterTokenizer(), Plan(1, 1, 2), seed, fits, system)


def make_data(
    texts: Sequence[str] | int = 10, *, seed: int = 0, limit: int = 3, system: str | None = None, **plan: Any
) -> OrderedData:
    """Rows "0", "1", …, or these texts; by default 5 steps of 2 prompts."""
    rows = [Row.from_text(text) for text in (map(str, range(texts)) if isinstance(texts, int) else texts)]
    numbers = {"steps": 5, "prompts_per_step": 2, "rollouts_per_prompt": 2} | plan
    return OrderedData([make_source(rows)], CharacterTokenizer(), Plan(**numbers), seed, limit, system)


def windows(data: OrderedData, state: RunState = RunState()) -> list[list[Prompt]]:  # noqa: B008
    """The prompts of each window, drawn as the loop does."""
    plan, drawn = data._plan, []
    while window := data.draw(state, plan.window_size(state.step)):
        drawn.append(window)
        moved = data.advance(state, [Group(prompt, ()) for prompt in window])
        state = replace(moved, step=state.step + -(-len(window) // plan.prompts_per_step))
    return drawn


def served(data: OrderedData, state: RunState = RunState()) -> list[list[tuple[int, str]]]:  # noqa: B008
    """The ordinals and texts of each window."""
    return [[(p.ordinal, p.messages[0]["content"]) for p in window] for window in windows(data, state)]


def texts_of(data: OrderedData, state: RunState = RunState()) -> list[str]:  # noqa: B008
    return [text for window in served(data, state) for _, text in window]


def test_order_depends_on_the_seed_alone() -> None:
    once = texts_of(make_data(steps=5))
    assert texts_of(make_data(steps=5)) == once
    assert texts_of(make_data(steps=1, prompts_per_step=10, rollouts_per_prompt=7)) == once
    assert texts_of(make_data(steps=5, sync_every=3)) == once
    assert texts_of(make_data(steps=5, seed=1)) != once


def test_order_is_the_same_on_every_machine_and_release() -> None:
    # random.Random("0/0") and ("0/1"), shuffling 0 … 9: a change here breaks the resume of every run there is
    assert "".join(texts_of(make_data(steps=5))) == "1024938675"
    assert "".join(texts_of(make_data(steps=10)))[10:] == "1435802679"


def test_each_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    texts = texts_of(make_data(10, steps=15))
    first, second, third = texts[:10], texts[10:20], texts[20:]
    assert sorted(first) == sorted(second) == sorted(third) == [str(i) for i in range(10)]
    assert first != second
    assert second != third


@pytest.mark.parametrize("sync_every", [0, 1, 2, 3])
@pytest.mark.parametrize("epochs", [None, 2])
@pytest.mark.parametrize("long_rows", [0, 3])
def test_windows_from_any_frontier_are_the_rest_of_those_from_the_start(
    sync_every: int, epochs: int | None, long_rows: int
) -> None:
    texts = [str(i) for i in range(7)] + ["too long"] * long_rows
    data = make_data(texts, steps=9, sync_every=sync_every, epochs=epochs)
    whole = served(data)
    state = RunState()
    for done, window in enumerate(whole, start=1):
        # two prompts a step, the last step may have one
        state = RunState(step=state.step + (len(window) + 1) // 2, next_ordinal=window[-1][0] + 1)
        assert served(data, state) == whole[done:]
    assert len(whole) > 2


def test_a_window_holds_the_prompts_of_sync_every_steps_and_the_last_what_is_left() -> None:
    # 5 steps of 2 prompts, 3 steps a window: 6 prompts and then 4
    assert [len(window) for window in windows(make_data(steps=5, sync_every=3))] == [6, 4]
    # never syncing still goes on step by step
    assert [len(window) for window in windows(make_data(steps=3, sync_every=0))] == [2, 2, 2]


def test_a_run_that_is_done_has_no_window_left() -> None:
    assert served(make_data(steps=5), RunState(step=5, next_ordinal=10)) == []
    assert served(make_data(3, steps=5, epochs=1), RunState(step=2, next_ordinal=3)) == []


def test_drawing_changes_nothing_and_starts_at_the_frontier() -> None:
    data = make_data(10)
    first = [prompt.ordinal for prompt in data.draw(RunState(next_ordinal=3), 4)]
    assert first == [prompt.ordinal for prompt in data.draw(RunState(next_ordinal=3), 4)] == [3, 4, 5, 6]
    assert data.draw(RunState(), 0) == []


def test_the_data_ends_with_the_last_epoch() -> None:
    data = make_data(3, epochs=2)
    assert [prompt.ordinal for prompt in data.draw(RunState(next_ordinal=4), 5)] == [4, 5]
    assert data.draw(RunState(next_ordinal=6), 5) == []


def test_the_frontier_is_behind_the_last_group_and_stays_where_there_is_none() -> None:
    data = make_data(10)
    groups = [Group(prompt, ()) for prompt in data.draw(RunState(next_ordinal=3), 2)]
    assert data.advance(RunState(step=7, next_ordinal=3), groups) == RunState(step=7, next_ordinal=5)
    assert data.advance(RunState(next_ordinal=3), []) == RunState(next_ordinal=3)


def test_a_run_is_over_when_its_steps_are_done_or_nothing_is_left_to_draw() -> None:
    data = make_data(3, steps=5, epochs=2)
    assert data.end(RunState(step=4, next_ordinal=5)) is None
    assert data.end(RunState(step=5, next_ordinal=5)) == "run.steps = 5 is reached"
    assert data.end(RunState(step=2, next_ordinal=6)) == "run.epochs = 2 is reached"


def graded(prompt: Prompt, num_correct: int) -> Group:
    """Four rollouts, so many of them correct."""
    correct = (True,) * num_correct + (False,) * (4 - num_correct)
    return make_group((0.0,) * 4, prompt=prompt, correct=correct)


def test_a_row_solved_at_the_rate_is_not_drawn_again_and_its_ordinals_stay_unused() -> None:
    data = make_data(3, steps=9, prompts_per_step=1, retire_pass_rate=0.75)
    # the first epoch serves rows 0 … 2 in some order, with 2, 3 and 4 of 4 correct: the last two are retired
    first = data.draw(RunState(), 3)
    state = data.advance(RunState(), [graded(prompt, count) for prompt, count in zip(first, (2, 3, 4), strict=True)])
    rows = [int(prompt.question) for prompt in first]
    assert state == RunState(next_ordinal=3, retired=tuple(sorted(rows[1:])))
    later = data.draw(state, 2)
    assert [int(prompt.question) for prompt in later] == [rows[0]] * 2
    second, third = (prompt.ordinal for prompt in later)
    assert 3 <= second < 6 <= third < 9  # one each epoch, at the place that its shuffle gives it
    assert data.draw(state, 2) == later


def test_retired_rows_add_up_and_are_sorted() -> None:
    data = make_data(200, retire_pass_rate=1.0)
    state = RunState(next_ordinal=200, retired=(3, 107))
    prompts = data.draw(state, 60)
    state = data.advance(state, [graded(prompt, 4) for prompt in prompts[:50]])
    assert list(state.retired) == sorted([3, 107, *(int(prompt.question) for prompt in prompts[:50])])
    assert data.advance(state, [graded(prompts[50], 3)]).retired == state.retired


def test_without_a_rate_no_row_is_retired() -> None:
    data = make_data(3)
    assert data.advance(RunState(), [graded(prompt, 4) for prompt in data.draw(RunState(), 3)]).retired == ()


def test_a_run_whose_rows_are_all_retired_is_over_and_says_so() -> None:
    data = make_data(["a", "b", "too long"], retire_pass_rate=0.5)
    assert data.end(RunState(retired=(0,))) is None
    assert data.draw(RunState(retired=(0, 1)), 2) == []
    expected = "every row was solved at filter.retire_pass_rate = 0.5 and is retired"
    assert data.end(RunState(step=1, retired=(0, 1))) == expected
    assert data.end(RunState(step=5, retired=(0, 1))) == "run.steps = 5 is reached"


def test_a_last_epoch_of_which_only_retired_rows_are_left_is_over() -> None:
    data = make_data(3, epochs=2, retire_pass_rate=0.5)
    last = int(data.draw(RunState(next_ordinal=5), 1)[0].question)
    assert data.draw(RunState(next_ordinal=5, retired=(last,)), 1) == []
    assert data.end(RunState(next_ordinal=5, retired=(last,))) == "run.epochs = 2 is reached"


def test_prompts_that_are_too_long_are_skipped_and_keep_their_ordinal() -> None:
    short = make_data(["a", "b", "c", "d"], steps=2)
    mixed = make_data(["a", "b", "long", "d"], steps=2)
    all_rows = {ordinal: text for window in served(short) for ordinal, text in window}
    place_of_long = next(ordinal for ordinal, text in all_rows.items() if text == "c")
    in_first_epoch = {ordinal: text for window in served(mixed) for ordinal, text in window if ordinal < 4}
    assert in_first_epoch == {ordinal: text for ordinal, text in all_rows.items() if text != "c"}
    assert mixed.prompt(place_of_long) is None
    assert mixed.all_lengths == [1, 1, 4, 1]
    assert mixed.lengths == [1, 1, 1]


def test_a_prompt_of_exactly_the_limit_is_kept() -> None:
    assert make_data(["abc", "abcd"], limit=3).is_kept == [True, False]


def test_each_source_has_its_own_limit() -> None:
    rows = [Row.from_text("abcd")]
    data = order(make_source(rows, max_prompt_tokens=9), make_source(rows, max_prompt_tokens=3), fits=4)
    assert (data.limits, data.is_kept) == ([4, 3], [True, False])


@pytest.mark.parametrize(
    ("epochs", "steps", "prompts_per_step", "expected"),
    [
        (None, 100, 4, 100),
        (1, 100, 4, 2),  # 7 rows: 4 and 3
        (2, 100, 4, 4),  # 14 rows: 4, 4, 4 and 2, across the epochs
        (2, 3, 4, 3),
        (1, 100, 7, 1),
        (1, 100, 50, 1),
    ],
)
@pytest.mark.parametrize("sync_every", [1, 2])
def test_a_run_has_as_many_steps_as_its_steps_and_epochs_allow(
    epochs: int | None, steps: int, prompts_per_step: int, expected: int, sync_every: int
) -> None:
    texts = [str(i) for i in range(7)] + ["too long"]
    data = make_data(texts, steps=steps, prompts_per_step=prompts_per_step, epochs=epochs, sync_every=sync_every)
    assert data.num_steps == expected
    really = sum(-(-len(window) // prompts_per_step) for window in windows(data))
    assert really == expected


def test_epochs_serve_each_kept_row_that_often() -> None:
    texts = texts_of(make_data(["a", "b", "too long", "d"], steps=100, epochs=3))
    assert sorted(texts) == ["a"] * 3 + ["b"] * 3 + ["d"] * 3


def test_a_prompt_carries_its_row() -> None:
    row = Row(({"role": "user", "content": "q"},), 4, ("exact",), "file", {"level": 2})
    prompt = order(make_source([row])).prompt(5)
    assert prompt is not None
    assert (prompt.ordinal, prompt.token_ids, prompt.messages) == (5, (ord("q"),), row.messages)
    assert (prompt.answer, prompt.reward, prompt.source, prompt.metadata) == (4, ("exact",), "file", {"level": 2})


def test_a_prompt_says_whether_its_answer_begins_inside_the_thinking() -> None:
    prompts = make_data(["q <think>\n", "q", "what is <think>?"], limit=99).in_order()
    assert [prompt.opens_thinking for prompt in prompts] == [True, False, False]


def test_evaluation_takes_every_kept_row_once_and_unshuffled() -> None:
    data = make_data(["a", "too long", "c", "d"])
    assert [(p.ordinal, p.messages[0]["content"]) for p in data.in_order()] == [(0, "a"), (2, "c"), (3, "d")]
    assert [p.ordinal for p in data.in_order(2)] == [0, 2]


def test_the_system_message_is_part_of_every_prompt_and_of_its_length() -> None:
    data = make_data(["a"], system="S")
    assert data.in_order()[0].token_ids == (ord("S"), ord("\n"), ord("a"))
    with pytest.raises(InputError, match="none of the 1 prompts fits"):
        make_data(["a"], system="SS")


def test_reward_choices_are_every_combination_that_rows_name() -> None:
    rows = [Row.from_text("a", reward=names) for names in [(), ("x",), ("x", "y"), ("x",)]]
    data = order(make_source(rows))
    assert data.reward_choices == {(), ("x",), ("x", "y")}


def test_rows_are_all_that_there_are_in_their_order() -> None:
    rows = [Row.from_text("a"), Row.from_text("too long"), Row.from_text("b")]
    data = order(make_source(rows), fits=5, seed=7)
    assert data.is_kept == [True, False, True]
    assert list(data.rows) == rows


def fingerprint(*rows: Row, system: str | None = None, seed: int = 0) -> str:
    return order(make_source(rows), fits=99, seed=seed, system=system).fingerprint


def test_the_fingerprint_changes_with_any_row_its_place_and_its_rendering() -> None:
    a, b = Row.from_text("a", answer="1"), Row.from_text("b", answer="1")
    others = [
        fingerprint(b, a),
        fingerprint(a),
        fingerprint(a, b, b),
        fingerprint(a, Row.from_text("c", answer="1")),
        fingerprint(a, Row.from_text("b", answer="2")),
        fingerprint(a, Row.from_text("b", answer="1", reward=("exact",))),
        fingerprint(a, Row.from_text("b", answer="1", metadata={"tests": [3]})),
        fingerprint(a, b, system="S"),
    ]
    assert fingerprint(a, b) not in others
    assert len(set(others)) == len(others)


def test_the_fingerprint_does_not_depend_on_the_run() -> None:
    rows = [Row.from_text("a"), Row.from_text("b", metadata={"when": object})]
    assert fingerprint(*rows) == fingerprint(*rows, seed=1)


def test_data_without_rows_is_refused() -> None:
    with pytest.raises(InputError, match="the sources hold no rows; give a file or a split that has some"):
        make_data([])


def test_data_of_which_nothing_fits_is_refused_with_the_shortest_and_the_limit() -> None:
    with pytest.raises(InputError) as caught:
        make_data(["four", "fives"], limit=3)
    assert "none of the 2 prompts fits: the shortest has 4 tokens and 3 are allowed" in str(caught.value)
    assert "raise max_prompt_tokens or lower rollout.max_new_tokens" in str(caught.value)


def test_rows_are_numbered_by_table() -> None:
    rows = [Row.from_text("a", source="x"), Row.from_text("b"), Row.from_text("c", source="x")]
    one = order(make_source(rows))
    assert one.row_names == ["row 1 of x", "row 2 of the data", "row 3 of x"]
    two = order(make_source(rows[:2]), make_source(rows[2:]))
    assert two.row_names == ["row 1 of x (table 1)", "row 2 of the data (table 1)", "row 1 of x (table 2)"]


def test_what_is_under_way_is_passed_over_and_stays_pending_when_others_are_done() -> None:
    data = make_data(10, steps=9)
    first = data.draw(RunState(), 5)
    assert [prompt.ordinal for prompt in data.draw(RunState(), 2, under_way={0, 1, 3})] == [2, 4]
    state = data.advance(RunState(), [Group(first[1], ()), Group(first[2], ())], under_way={0, 3, 4})
    assert state == RunState(next_ordinal=5, pending=(0, 3, 4))
    assert [prompt.ordinal for prompt in data.draw(state, 5)] == [0, 3, 4, 5, 6]  # as a resumed run would
    assert [prompt.ordinal for prompt in data.draw(state, 2, under_way={0, 3, 4})] == [5, 6]
    later = data.advance(state, [Group(first[0], ()), Group(first[4], ())], under_way={3, 5})
    assert later == RunState(next_ordinal=6, pending=(3, 5))


def test_a_pending_prompt_whose_row_was_retired_meanwhile_is_still_drawn() -> None:
    data = make_data(3, steps=9, retire_pass_rate=0.5)
    rows = [int(prompt.question) for prompt in data.draw(RunState(), 3)]
    state = RunState(next_ordinal=3, pending=(1,), retired=tuple(sorted(rows)))
    assert [prompt.ordinal for prompt in data.draw(state, 4)] == [1]
    assert data.end(state) is None
    assert data.end(replace(state, pending=())) is not None
