import json
from typing import Any

import pytest

from podium.reward.code_stdio import code_stdio, is_same
from podium.reward.sandbox import _problem
from tests.builders import make_prompt, make_rollout

pytestmark = pytest.mark.skipif(_problem("bubblewrap") is not None, reason=f"no sandbox: {_problem('bubblewrap')}")
CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "20 22", "output": "42"}]
ADD = "a, b = map(int, input().split())\nprint(a + b)"


def score(program: str, cases: Any = CASES, **options: Any) -> float:
    return code_stdio(make_prompt(answer=cases), make_rollout(f"```python\n{program}\n```"), **options)


@pytest.mark.parametrize("cases", [CASES, json.dumps(CASES)])
def test_a_right_program_scores_1(cases: Any) -> None:
    assert score(ADD, cases) == 1.0


def test_the_score_is_the_share_of_cases_passed() -> None:
    assert score("print(3)") == 0.5
    assert score("print(3)", threshold=0.6) == 0.0
    assert score("print(3)", threshold=0.5) == 1.0


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True),
        ("3  \n\n", "3\n", True),
        ("1 2\n3", "1  2\n3\n", True),
        ("1.0", "1", True),
        ("1e3", "1000", True),
        ("0.30000000000000004", "0.3", False),
        ("YES", "yes", False),
        ("1\n2", "1 2", False),
        ("1", "1\n1", False),
        ("", "", True),
        ("", "0", False),
        ("nan", "nan", True),
        ("\n3", "3", False),
    ],
)
def test_outputs_are_compared_word_by_word_and_numbers_as_numbers(printed: str, expected: str, same: bool) -> None:
    assert is_same(printed, expected) is same


PROGRAMS = {
    "a main part": ("def main():\n  print(sum(map(int, input().split())))\nif __name__ == '__main__':\n  main()", 1.0),
    "all of the input at once": ("import sys\nprint(sum(map(int, sys.stdin.read().split())))", 1.0),
    "the input as a file": ("print(sum(map(int, open(0).read().split())))", 1.0),
    "bytes": ("import sys\nsys.stdout.buffer.write(b'%d' % sum(map(int, sys.stdin.buffer.read().split())))", 1.0),
    "a thread that nobody awaits": (
        "import threading\nthreading.Thread(target=lambda: print(sum(map(int, input().split())))).start()",
        1.0,
    ),
    "a deep recursion": (
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "def main():\n  a, b = map(int, input().split())\n  print(a + b + deep(20000) - 20000)\n"
        "t = threading.Thread(target=main); t.start(); t.join()",
        1.0,
    ),
    "a function for the end": ("import atexit\natexit.register(lambda: print(sum(map(int, input().split()))))", 1.0),
    "an exit with code 0": (ADD + "\nimport sys; sys.exit(0)", 1.0),
    "an exit with code 1": (ADD + "\nimport sys; sys.exit(1)", 0.0),
    "an error after the output": (ADD + "\n1 / 0", 0.0),
    "a leave before the output is written": (ADD + "\nimport os; os._exit(0)", 0.0),
    "a leave after it is written": (ADD + "\nimport os, sys; sys.stdout.flush(); os._exit(0)", 1.0),
    "nothing": ("", 0.0),
    "every number": ("for i in range(100): print(i)", 0.0),
    "a program that is none": ("print(", 0.0),
    "the other process's output": (
        "import os\nfor d in range(3, 64):\n  try: os.write(d, b'3')\n  except OSError: pass",
        0.0,
    ),
    "too much output": (ADD + "\nprint('x' * (1 << 23))", 0.0),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_read_and_print_as_anywhere_else(name: str) -> None:
    program, expected = PROGRAMS[name]
    assert score(program) == expected


def test_large_inputs_and_outputs_go_through() -> None:
    numbers = " ".join(map(str, range(100000)))
    case = {"input": numbers, "output": numbers.replace(" ", "\n")}
    assert score("print(*input().split(), sep='\\n')", [case]) == 1.0


def test_lines_may_be_given_as_lists() -> None:
    assert score("print(int(input()) + int(input()))", [{"input": ["1", "2"], "output": ["3"]}]) == 1.0


def test_cases_without_input_or_output_abstain_with_the_reason() -> None:
    with pytest.raises(ValueError, match='must have an "input" and an "output"'):
        score(ADD, [{"input": "1 2"}])


def test_without_a_block_the_score_is_0() -> None:
    assert code_stdio(make_prompt(answer=CASES), make_rollout("I cannot do that.")) == 0.0
