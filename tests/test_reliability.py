"""docs/reliability.md names a test for every goal and scenario, and each of them is there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reliability.md"
COUNTS = {"G": 20, "R": 13, "D": 8, "W": 8, "B": 7, "N": 3, "V": 4, "H": 8, "S": 6}
"""Goals and scenarios of each kind."""
ROWS = dict(re.findall(r"^\| ([A-Z]\d+) \|(.+)\|$", PAGE.read_text(), re.MULTILINE))


@cache
def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_every_goal_and_scenario_has_a_row() -> None:
    assert set(ROWS) == {f"{kind}{number}" for kind, count in COUNTS.items() for number in range(1, count + 1)}


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_that_a_row_names_exist(row: str) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", ROWS[row])
    assert named, f"{row} names no test"
    missing = [f"{file}::{name}" for file, name in named if name not in functions_of(TESTS / file)]
    assert missing == []


def test_everything_in_the_column_of_tests_is_a_test() -> None:
    """A name in another form would not be looked for."""
    for row, cells in ROWS.items():
        column = cells.rpartition(" | ")[2]
        assert re.fullmatch(r"(`[\w/]+\.py::\w+`(, )?)+", column.strip()), row
