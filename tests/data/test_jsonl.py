import json
from pathlib import Path
from typing import Any

import pytest

from podium.data.jsonl import jsonl
from podium.errors import InputError
from podium.records import Row


def rows_of(folder: Path, *lines: Any) -> list[Row]:
    """The rows of a file with these lines; bytes and texts as they are, all else as JSON."""
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    (folder / "rows.jsonl").write_bytes(b"\n".join(raw))
    return jsonl(path=f"{folder}/rows.jsonl")


USER = ({"role": "user", "content": "Why?"},)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"prompt": "Why?"}, Row(USER)),
        ({"question": "Why?", "answer": "so"}, Row(USER, "so")),
        ({"prompt": "Why?", "ground_truth": ["so", "thus"]}, Row(USER, ["so", "thus"])),
        ({"prompt": "Why?", "answer": 0, "ground_truth": 1}, Row(USER, 0)),
        ({"messages": [{"role": "user", "content": "Why?", "name": "x"}]}, Row(USER)),
        ({"prompt": [{"role": "user", "content": "Why?"}]}, Row(USER)),
        ({"prompt": "Why?", "reward": "exact"}, Row(USER, reward=("exact",))),
        ({"prompt": "Why?", "dataset": "exact"}, Row(USER, reward=("exact",))),
        ({"prompt": "Why?", "reward": ["exact", "arithmetic"]}, Row(USER, reward=("exact", "arithmetic"))),
        ({"prompt": "Why?", "reward": []}, Row(USER)),
        ({"prompt": "Why?", "level": 3, "question": "Other?"}, Row(USER, metadata={"level": 3, "question": "Other?"})),
    ],
)
def test_a_row_is_read_in_each_of_its_forms(tmp_path: Path, given: dict[str, Any], expected: Row) -> None:
    assert rows_of(tmp_path, given) == [expected]


def test_messages_keep_their_turns(tmp_path: Path) -> None:
    turns = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant", "tool", "user")]
    assert rows_of(tmp_path, {"messages": turns})[0].messages == tuple(turns)


def test_blank_lines_are_no_rows_but_count_as_lines(tmp_path: Path) -> None:
    assert len(rows_of(tmp_path, {"prompt": "a"}, "", "  ", {"prompt": "b"}, "")) == 2
    with pytest.raises(InputError, match="row 3:"):
        rows_of(tmp_path, {"prompt": "a"}, "", "x")


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        ("not json", "Expecting value"),
        ('{"prompt": "a"', "delimiter"),
        (b'{"prompt": "\xff"}', "codec can't decode"),
        ("[1]", "expected an object, found list"),
        ("3", "expected an object, found int"),
        ("null", "expected an object, found NoneType"),
        ({}, "has none of 'messages', 'prompt', 'question'"),
        ({"text": "a"}, "has none of 'messages', 'prompt', 'question'"),
        ({"prompt": 3}, "'prompt' must be a text that is not empty, not 3"),
        ({"prompt": None}, "'prompt' must be a text that is not empty, not None"),
        ({"prompt": " \n"}, "'prompt' must be a text that is not empty"),
        ({"question": {"a": 1}}, "'question' must be a text that is not empty"),
        ({"question": ["a"]}, "a turn needs a 'role' out of system, user, assistant, tool"),
        ({"prompt": []}, "'prompt' must be a list with at least one turn"),
        ({"prompt": "a" * 4_000_001}, "'prompt' has 4,000,001 characters; at most 4,000,000 are read"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "'messages' has no turn to answer"),
        ('{"prompt": "a", "answer": "\\udc00"}', "surrogates not allowed"),
        ('{"prompt": "a", "answer": NaN}', "NaN is not a JSON value"),
        ('{"prompt": "a", "answer": -1e999}', "the number -1e999 is too large"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
        ('{"prompt": "a", "tests": {"in": 1, "in": 2}}', "'in' is given twice"),
        ('{"prompt": "a", "x": ' + "[" * 100_000, "nested too deeply"),
        ({"prompt": "a\0b"}, "'prompt' holds a NUL character"),
        ('{"prompt": "\\ud800"}', "surrogates not allowed"),
        ({"messages": []}, "'messages' must be a list with at least one turn"),
        ({"messages": "a"}, "'messages' must be a list with at least one turn"),
        ({"messages": ["a"]}, "a turn needs a 'role' out of system, user, assistant, tool"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "a turn needs a 'role' out of"),
        ({"messages": [{"role": "user"}]}, "'content' must be a text that is not empty, not None"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "'content' must be a text"),
        ({"prompt": "a", "reward": 3}, "'reward' must be a name or a list of names, not 3"),
        ({"prompt": "a", "reward": None}, "'reward' must be a name or a list of names, not None"),
        ({"prompt": "a", "reward": [""]}, "'reward' must be a name or a list of names"),
        ({"prompt": "a", "reward": {"exact": 1}}, "'reward' must be a name or a list of names"),
    ],
)
def test_a_bad_row_is_named_by_its_number(tmp_path: Path, bad: Any, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        rows_of(tmp_path, {"prompt": "good"}, bad, {"prompt": "good"})
    head, only = str(caught.value).splitlines()
    assert head == f"{tmp_path}/rows.jsonl has 1 bad row; fix or remove it:"
    assert only.startswith("  row 2: ")
    assert complaint in only


def test_every_bad_row_is_counted_and_the_first_twenty_are_shown(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        rows_of(tmp_path, *[{"prompt": "good"}, "bad"] * 23)
    head, *shown, last = str(caught.value).splitlines()
    assert "has 23 bad rows" in head
    assert [line.split(":")[0] for line in shown] == [f"  row {2 * i}" for i in range(1, 21)]
    assert last == "  and 3 more"


def test_exactly_twenty_bad_rows_are_all_shown(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        rows_of(tmp_path, *["bad"] * 20)
    assert str(caught.value).splitlines()[-1].startswith("  row 20: ")


def test_columns_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        '{"ask": "Why?", "gold": 4, "kind": ["exact"], "prompt": "no", "answer": "no", "reward": 0.5}'
    )
    (row,) = jsonl(path=f"{tmp_path}/rows.jsonl", prompt_column="ask", answer_column="gold", reward_column="kind")
    assert row == Row(USER, 4, ("exact",), metadata={"prompt": "no", "answer": "no", "reward": 0.5})
    (row,) = jsonl(path=f"{tmp_path}/rows.jsonl", prompt_column="ask", answer_column="gold", reward_column=False)
    assert row.reward == ()
    assert row.metadata["reward"] == 0.5


def test_a_column_that_a_row_does_not_have_is_named_with_those_it_has(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "gold": 1}')
    with pytest.raises(InputError, match="row 1: has no 'golden'; it has: 'gold'"):
        jsonl(path=f"{tmp_path}/rows.jsonl", answer_column="golden")


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    assert rows_of(tmp_path, b"\xef\xbb\xbf" + b'{"prompt": "Why?"}') == [Row(USER)]


def test_text_in_utf_16_is_named_as_such(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is UTF-16 text; save it as UTF-8"):
        rows_of(tmp_path, '{"prompt": "Why?"}'.encode("utf-16"))


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    assert rows_of(tmp_path) == []


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_a_path_that_is_no_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="no such file"):
        jsonl(path=str(tmp_path / name))
