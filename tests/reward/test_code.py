"""The judge of programs: honest ones pass, whatever their tests look like; cheats do not, whatever they try."""

import json
import subprocess
import sys
import textwrap
import time
from typing import Any

import pytest

from podium.errors import InputError
from podium.records import Row
from podium.reward.code import code, program_in
from podium.reward.code_stdio import code_stdio
from podium.reward.sandbox import _problem
from tests.builders import make_prompt, make_rollout

pytestmark = pytest.mark.skipif(_problem("bubblewrap") is not None, reason=f"no sandbox: {_problem('bubblewrap')}")
ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(20, 22) == 42"]


def answer_with(program: str) -> str:
    return f"Here it is:\n\n```python\n{textwrap.dedent(program)}\n```\n"


def score(program: str, tests: Any = TESTS, **options: Any) -> float:
    options = {"test_timeout_s": 1.0} | options
    return code(make_prompt(answer=tests), make_rollout(answer_with(program)), **options)


# ---- what counts as the program, and as tests


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no block at all: x = 1", None),
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```\nor better\n```python\nx = 2\n```\nDone.", "x = 2\n"),
        ("```python\nx = 1", None),  # cut off
        ("text ```x = 1``` text", None),
        ("```python\ns = 'a ``` b'\n```", "s = 'a ``` b'\n"),
        ("```python\n```", ""),
        ("1. first\n   ```python\n   if x:\n     y\n   ```", "if x:\n  y\n"),
        ("```a\nx\n```b\ny\n```", "x\n```b\ny\n"),
    ],
)
def test_the_program_is_the_program_in(text: str, expected: str | None) -> None:
    assert program_in(text) == expected


F, G = "def f(x):\n    return x * 2\n", "def g(x):\n    return x\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"```python\n{F}```\nExample usage:\n```python\nprint(f(2))\n```", F),
        (f"```python\n{F}```\nExample usage:\n```python\nresult = f(2)\n```", F),
        (f"```python\n{F}```\nOutput:\n```\n4\n```", F),
        (f"```\n{F}```\nOutput:\n```\n4\n```", F),
        (f"```\n{F}```\n```python\nprint(f(2))\n```", F),
        (f"```python\n{F}```\nor\n```Python3\n{G}{F}```\n```sh\npython f.py\n```", G + F),
        (f"```python\n{F}```\nNow broken:\n```python\n{F}return (\n```", F + "return (\n"),
        (f"~~~python\n{F}# ```\n~~~\n```\n4\n```", F + "# ```\n"),
        (f"```python\n{G}```\n```python\nprint(1)\n```\n```\n4\n```", "print(1)\n"),
        ("```py\nf = lambda x: x * 2\n```\n```py\nf(2) == 4\n```", "f = lambda x: x * 2\n"),
        (f"```py\nclass f(int):\n    x: int = 1\n```\n```py\n{G}```", "class f(int):\n    x: int = 1\n"),
    ],
)
def test_a_block_behind_the_program_is_not_the_program(text: str, expected: str) -> None:
    assert program_in(text, ["result = f(2)\nassert result == 4"]) == expected


def test_an_example_behind_a_right_program_costs_nothing() -> None:
    text = answer_with(ADD) + "Example usage:\n```python\nprint(add(1, 2))\n```\nOutput:\n```\n3\n```\n"
    assert code(make_prompt(answer=TESTS), make_rollout(text), sandbox="weak") == 1
    text = answer_with("print(3)") + "Output:\n```\n3\n```\n"
    assert code_stdio(make_prompt(answer=[{"input": "", "output": "3"}]), make_rollout(text), sandbox="weak") == 1


def test_a_long_answer_without_an_end_takes_no_time() -> None:
    started = time.process_time()
    assert program_in("```\n" * 50001) is not None
    assert program_in("```a\n" * 50000) is None
    assert program_in("``` " * 100000) is None
    assert time.process_time() - started < 20  # by the square of the length it would be an hour


def test_without_a_block_the_score_is_0() -> None:
    assert code(make_prompt(answer=TESTS), make_rollout("I cannot do that.")) == 0.0


@pytest.mark.parametrize("tests", [TESTS, json.dumps(TESTS), "\n".join(TESTS)])
def test_tests_are_a_list_or_its_json_or_one_text(tests: Any) -> None:
    assert score(ADD, tests) == 1.0


@pytest.mark.parametrize("tests", [None, [], "[]", 3, {"a": 1}])
def test_a_row_without_tests_abstains_with_the_reason(tests: Any) -> None:
    with pytest.raises(ValueError, match="not a list of tests"):
        score(ADD, tests)


def test_the_score_is_the_share_of_tests_passed() -> None:
    tests = [*TESTS, "assert add(1, 1) == 3", "assert add('a', 1) == 'a1'"]
    assert score(ADD, tests) == 0.5
    assert score(ADD, tests, threshold=0.5) == 1.0
    assert score(ADD, tests, threshold=0.75) == 0.0


def test_tests_after_one_that_hangs_or_crashes_are_still_judged() -> None:
    program = """
        import os
        def f(x):
            if x == 1:
                os._exit(0)
            if x == 2:
                while True: pass
            return x
    """
    tests = [f"assert f({x}) == {x}" for x in range(5)]
    assert score(program, tests, test_timeout_s=0.3) == 0.6  # 0, 3 and 4 of five


def test_a_program_that_does_not_even_start_is_tried_once() -> None:
    started = time.monotonic()
    assert score("import time; time.sleep(600)", [*TESTS] * 10, test_timeout_s=3) == 0.0
    assert time.monotonic() - started < 20  # ten tries would take ten times 3 s
    assert score("def add(a, b) return a + b", [*TESTS] * 10) == 0.0


# ---- honest programs

HONEST = {
    "plain values": (
        "def f(): return [1, 2.5, 'a', None, True, (1,), {2}, {'k': b'x'}, 3 + 4j, 10 ** 30]",
        [
            "assert f() == [1, 2.5, 'a', None, True, (1,), {2}, {'k': b'x'}, 3 + 4j, 10 ** 30]",
            "assert f()[3] is None and f()[4] is True and type(f()[5]) is tuple",
        ],
    ),
    "a tuple is no list": ("def f(): return (1, 2)", ["assert f() == (1, 2)", "assert f() != [1, 2]"]),
    "infinities": ("def f(x): return x * 2", ["assert f(float('inf')) == float('inf')", "assert f(0.1) == 0.2"]),
    "big numbers": ("def f(n):\n  return 1 if n < 2 else n * f(n - 1)", ["assert f(900) == math.factorial(900)"]),
    "arguments by name": ("def f(a, *, b=1): return a - b", ["assert f(3, b=2) == 1", "assert f(a=3) == 2"]),
    "a helper in the test": (ADD, ["def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)"]),
    "a test with a loop": (ADD, ["for i in range(5):\n    assert add(i, i) == 2 * i"]),
    "a function of tests": (ADD, ["def test_it():\n    assert add(1, 2) == 3\ntest_it()"]),
    "an imported module": (ADD, ["import math\nassert math.isclose(add(0.1, 0.2), 0.3)"]),
    "a module that nobody imported": (ADD, ["assert math.isclose(add(0.1, 0.2), 0.3)"]),
    "an expected error": (
        "def f(x):\n  raise ValueError('no ' + x)",
        ["try:\n    f('way')\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no way'"],
    ),
    "arguments changed in place": (
        "def f(x, y):\n  x.sort(); y['n'] = 1",
        ["x, y = [3, 1, 2], {}\nf(x, y)\nassert x == [1, 2, 3] and y == {'n': 1}"],
    ),
    "a generator": (
        "def f(n):\n  yield from range(n)",
        ["assert list(f(3)) == [0, 1, 2]", "assert 2 in f(3)", "assert sum(f(4)) == 6"],
    ),
    "a class": (
        "class Stack:\n"
        "  def __init__(self): self.items = []\n"
        "  def push(self, x): self.items.append(x); return self\n"
        "  def __len__(self): return len(self.items)\n"
        "  def __getitem__(self, i): return self.items[i]\n",
        ["s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s[1] == 2 and s.items == [1, 2]"],
    ),
    "a data class": (
        "from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int\n  y: int\ndef f(): return P(1, 2)",
        ["assert f() == P(1, 2)", "assert repr(f()) == 'P(x=1, y=2)'", "p = f()\np.x = 5\nassert p.x == 5"],
    ),
    "a named tuple": (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
        ["assert f() == (1, 2)"],
    ),
    "a counter": (
        "from collections import Counter\ndef f(t): return Counter(t)",
        ["assert f('aab') == Counter('aab')"],
    ),
    "functions handed over": (
        "def twice(f, x): return f(f(x))\ndef conv(x, t): return t(x)",
        [
            "assert twice(lambda x: x * 3, 2) == 18",
            "assert conv('7', int) == 7",
            "assert conv([3, 1], sorted) == [1, 3]",
        ],
    ),
    "functions that come back": (
        "def compose(f, g): return lambda x: f(g(x))",
        ["assert compose(lambda x: x + 1, lambda x: x * 2)(5) == 11"],
    ),
    "a function that asks the program again": (
        ADD + "def twice(f, x): return f(f(x))",
        ["assert twice(lambda x: add(x, 1), 3) == 5"],
    ),
    "a decimal": (
        "from decimal import Decimal\ndef f(x): return Decimal(x) / 3",
        [
            "from decimal import Decimal\nassert f('1.5') == Decimal('0.5')",
            "assert f('1.5') == 0.5",
            "import decimal\nassert f(decimal.Decimal(6)) == 2 and type(f(6)) is decimal.Decimal",
        ],
    ),
    "a fraction": (
        "from fractions import Fraction\ndef f(x): return [Fraction(x, 3)]",
        [
            "from fractions import Fraction\nassert f(2) == [Fraction(2, 3)]",
            "assert f(6) == [2]",
            "assert abs(f(1)[0] - 1 / 3) < 1e-9",
        ],
    ),
    "dates and times": (
        "from datetime import *\ndef f(d, n): return d + timedelta(days=n)\ndef g(): return time(9, 30)\n"
        "def h(): return datetime(2024, 1, 2, 3, 4, 5, 6, timezone(timedelta(hours=2)))",
        [
            "import datetime\nassert f(datetime.date(2024, 2, 28), 2) == datetime.date(2024, 3, 1)",
            "from datetime import *\nassert f(datetime(2024, 1, 31, 5), 1) == datetime(2024, 2, 1, 5)",
            "import datetime\nassert g() == datetime.time(9, 30)",
            "from datetime import *\nassert h() == datetime(2024, 1, 2, 1, 4, 5, 6, UTC) and h().hour == 3",
            "from datetime import *\nassert f(date(2024, 1, 2), 1) - date(2024, 1, 1) == timedelta(2)",
        ],
    ),
    "a range and a deque": (
        "from collections import deque\ndef f(n): return range(n)\ndef g(n): return deque(range(n), 2)",
        ["assert f(3) == range(3) and list(f(2)) == [0, 1]", "assert g(5) == deque([3, 4]) and g(5).maxlen == 2"],
    ),
    "what an object holds": (
        "class Box:\n"
        "  def __init__(self, *items): self.items = list(items)\n"
        "  def __contains__(self, x): return x in self.items\n"
        "  def __delitem__(self, i): del self.items[i]\n"
        "  def __getitem__(self, i): return self.items[i]\n"
        "class Small:\n  def __contains__(self, x): return x < 10\n",
        [
            "assert 3 in Box(3, 4) and 5 not in Box(3, 4)",
            "b = Box('a', 'b', 'c')\ndel b[0]\nassert 'a' not in b",
            "assert Box(1, 2, 3)[1:] == [2, 3]",
            "assert 5 in Small() and 15 not in Small()",
            "x = Box(1)\nassert x in Box(x)",
        ],
    ),
    "the object of a with": (
        "class Log:\n"
        "  def __init__(self): self.seen = []\n"
        "  def __enter__(self): self.seen.append('in'); return self\n"
        "  def __exit__(self, kind, error, trace): self.seen.append(kind and kind.__name__)\n"
        "from contextlib import contextmanager\n"
        "@contextmanager\ndef opened(x):\n  yield x + 1\n",
        [
            "log = Log()\nwith log as it:\n    assert it.seen == ['in']\nassert log.seen == ['in', None]",
            "with opened(2) as value:\n    assert value == 3",
            "log = Log()\ntry:\n    with log:\n        raise KeyError('x')\nexcept KeyError:\n    pass\n"
            "assert log.seen == ['in', 'KeyError']",
        ],
    ),
    "an iterator by hand": (
        "def f(n):\n  yield from range(n)",
        ["it = f(2)\nassert next(it) == 0 and next(it) == 1 and list(it) == []"],
    ),
    "a constant": ("ANSWER = 42", ["assert ANSWER == 42"]),
    "a main part": (ADD + "if __name__ == '__main__':\n  input()\n  raise SystemExit(1)", TESTS),
    "output on the way": ("def add(a, b):\n  print('adding' * 10000)\n  return a + b", TESTS),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "def add(a, b):\n  with ThreadPoolExecutor(2) as pool: return sum(pool.map(int, [a, b]))",
        TESTS,
    ),
}


LIMITS = {
    "arithmetic on an object": ("class A:\n  def __add__(self, x): return 3", "assert A() + 1 == 3"),
    "order of objects": ("class A:\n  def __lt__(self, x): return True", "assert A() < A()"),
    "isinstance": ("class A: pass\ndef f(): return A()", "assert isinstance(f(), A)"),
    "an enumeration as a number": ("import enum\nclass E(enum.IntEnum):\n  A = 1", "assert E.A == 1"),
    "an error that is swallowed": (
        "import contextlib\ndef f(): return contextlib.suppress(KeyError)",
        "with f():\n    raise KeyError",
    ),
    "the end of an iterator": ("def f(): yield 1", "it = f()\nnext(it)\nassert next(it, 0) == 0"),
    "a coroutine": ("async def f(): return 1", "import asyncio\nassert asyncio.run(f()) == 1"),
    "a built-in name": ("def sum(x): return 7", "assert sum([1]) == 7"),
    "the value of an enumeration": ("import enum\nclass E(enum.IntEnum):\n  A = 1", "assert E.A.value == 1"),
}
"""What docs/how_to/score_programs.md says that tests cannot do; the last one is its way out."""


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_are_those_that_the_documentation_names(name: str) -> None:
    program, test = LIMITS[name]
    assert score(program, [test]) == float(name == "the value of an enumeration")


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(name: str) -> None:
    program, tests = HONEST[name]
    assert score(program, tests) == 1.0
    assert score(program, [f"{test}\nassert 1 == 2" for test in tests]) == 0.0  # they are really run


# ---- cheats: (program, tests); none may pass a single test

EQUAL_TO_ALL = """
class Yes:
    __hash__ = None
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0.0
    __rsub__ = __sub__
    def __abs__(self): return 0.0
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __float__(self): return 3.0
def add(a, b): return Yes()
"""
CHEATS: dict[str, tuple[str, list[str]]] = {
    "exits": ("import sys; sys.exit(0)", TESTS),
    "leaves at once": ("import os; os._exit(0)", TESTS),
    "exits when called": ("import sys\ndef add(a, b): sys.exit(0)", TESTS),
    "leaves when called": ("import os\ndef add(a, b): os._exit(0)", TESTS),
    "raises the end of iteration": ("def add(a, b): raise StopIteration(3)", TESTS),
    "ends the loop of a test": (
        "def f(x): raise StopIteration",
        [
            "for a, b in zip(map(f, [1, 2]), [2, 3]): assert a == b",
            "assert all(map(lambda case: f(case[0]) == case[1], [(1, 2), (2, 3)]))",
        ],
    ),
    "raises the end of generators": ("def add(a, b): raise GeneratorExit", TESTS),
    "an object equal to all": (EQUAL_TO_ALL, [*TESTS, "assert 3 == add(1, 2)", "assert add(1, 2) in [3]"]),
    "an object close to all": (EQUAL_TO_ALL, ["assert abs(add(1, 2) - 3) < 1e-6", "assert math.isclose(add(1, 2), 3)"]),
    "an object less than all": (EQUAL_TO_ALL, ["assert add(1, 2) < 4", "assert 2 <= add(1, 2) <= 4"]),
    "an object that holds all": (EQUAL_TO_ALL, ["assert 3 in add(1, 2)"]),
    "a decimal equal to all": (
        "from decimal import Decimal\nclass D(Decimal):\n  def __eq__(s, o): return True\ndef add(a, b): return D(0)",
        TESTS,
    ),
    "its own decimal": (
        "import decimal\nclass D:\n  def __eq__(s, o): return True\n"
        "D.__module__, D.__name__, D.__qualname__ = 'decimal', 'Decimal', 'Decimal'\ndecimal.Decimal = D\n"
        "def add(a, b): return D()",
        [*TESTS, "import decimal\nassert add(1, 2) == decimal.Decimal(3)"],
    ),
    "its own date": (
        "import datetime\nclass date:\n  year = month = day = property(lambda self: 0)\n"
        "date.__module__ = 'datetime'\ndatetime.date = date\ndef f(): return date()",
        ["import datetime\nassert f() == datetime.date(2024, 1, 1)"],
    ),
    "swallows the errors of a with": (
        "class Swallows:\n  def __enter__(self): return 0\n  def __exit__(self, *error): return True\n"
        "def f(): return Swallows()\ndef g(x): raise ValueError",
        ["with f() as x:\n    assert x == 3", "with f() as x:\n    assert g(x) == 3"],
    ),
    "ends the iterator of a test": (
        "def f():\n  yield 1",
        [
            "it = f()\nassert all(map(lambda x: next(it) == x, [1, 2]))",
            "it = f()\nassert [next(it) for _ in range(2)] and False",
        ],
    ),
    "an object that holds every number": (
        "class N:\n  def __contains__(self, x): return isinstance(x, (int, float)) or x > 0\n"
        "class M:\n  def __contains__(self, x): return True\n  def __iter__(self): return iter([3])\n"
        "def f(): return M()",
        ["assert 3 in f()", "assert 'a' in M()", "assert None in M()"],
    ),
    "an integer equal to all": ("class I(int):\n  def __eq__(s, o): return True\ndef add(a, b): return I(0)", TESTS),
    "a text equal to all": ("class S(str):\n  def __eq__(s, o): return True\ndef add(a, b): return S()", TESTS),
    "a list equal to all": (
        "class L(list):\n  def __eq__(s, o): return True\ndef f(): return L()",
        ["assert f() == [1]", "assert [1] == f()"],
    ),
    "its own abs": ("def root(x): return 9\nabs = lambda x: 0", ["assert abs(root(2) - 1.414) < 0.01"]),
    "its own built-in functions": (
        "import builtins\nfor name in dir(builtins):\n"
        "  if name[0].islower(): setattr(builtins, name, lambda *a, **k: True)\n"
        "def f(x): return x",
        ["assert len(f([1])) == 2", "assert all(f([False]))", "assert isinstance(f(1), str)"],
    ),
    "its own assertion error": ("import builtins\nbuiltins.AssertionError = OSError\ndef add(a, b): return 0", TESTS),
    "its own module": (
        "class math: isclose = staticmethod(lambda *a, **k: True)\ndef f(): return 9",
        ["assert math.isclose(f(), 3)"],
    ),
    "a patched module": (
        "import math\nmath.isclose = lambda *a, **k: True\ndef f(): return 9",
        ["assert math.isclose(f(), 3)"],
    ),
    "its own counter": ("Counter = lambda t: 1\ndef f(t): return 1", ["assert f('aab') == Counter('aab')"]),
    "a module in the folder": (
        "open('/tmp/statistics.py', 'w').write('mean = lambda x: 3')\ndef f(): return [9]",
        ["import statistics\nassert statistics.mean(f()) == 3", "assert statistics.mean(f()) == 3"],
    ),
    "a module on the path": (
        "import sys\nopen('/tmp/statistics.py', 'w').write('mean = lambda x: 3')\n"
        "sys.path.insert(0, '/tmp')\ndef f(): return [9]",
        ["import statistics\nassert statistics.mean(f()) == 3"],
    ),
    "says that it passed": ("print('passed')\ndef add(a, b): print('passed', flush=True)", TESTS),
    "writes verdicts into every file": (
        "import os\nword = b's\\x06\\x00\\x00\\x00passed'\nframe = len(word).to_bytes(4, 'little') + word\n"
        "def forge():\n"
        "  for d in range(256):\n"
        "    try: os.write(d, frame * 2)\n"
        "    except OSError: pass\n"
        "forge()\ndef add(a, b): forge()",
        TESTS,
    ),
    "looks for the tests in memory": (
        "import gc, sys\n"
        "def add(a, b):\n"
        "  frame, found = sys._getframe(), []\n"
        "  while frame: found += [str(frame.f_locals), str(frame.f_globals)]; frame = frame.f_back\n"
        "  found += [str(x) for x in gc.get_objects() if isinstance(x, (str, bytes, list, tuple, dict))]\n"
        "  import re\n"
        "  hit = re.search(r'assert add.{1,20}== ?(\\d+)', ' '.join(found))\n"
        "  return int(hit[1]) if hit else None",
        TESTS,
    ),
    "looks for the tests in files": (
        "import os\n"
        "def add(a, b):\n"
        "  for place, _, names in os.walk('/'):\n"
        "    if place.startswith(('/usr', '/proc', '/root', '/lib')): continue\n"
        "    for name in names:\n"
        "      try: text = open(os.path.join(place, name)).read()\n"
        "      except (OSError, ValueError): continue\n"
        "      if 'assert add' in text: return int(text.split('==')[1].split()[0])",
        TESTS,
    ),
    "kills the judge": ("import os\ndef add(a, b):\n  os.kill(os.getppid(), 9); return 0", TESTS),
    "traces every call": ("import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda *a: None)", TESTS),
    "defines nothing": ("x = 1", [*TESTS, "assert True", "pass"]),
    "hides the functions of the test": ("def assertEqual(a, b): pass", ["assertEqual(1, 2)\nassert 1 == 2"]),
    "answers before it is asked": (
        "import os\nframe = b'\\x00' * 4\n"
        "for d in range(3, 64):\n"
        "  try: os.write(d, frame * 100)\n"
        "  except OSError: pass\n"
        "def add(a, b): return 0",
        TESTS,
    ),
    "nests without end": ("def add(a, b):\n  x = []\n  for _ in range(100000): x = [x]\n  return x", TESTS),
    "contains itself": ("def add(a, b):\n  x = []\n  x.append(x)\n  return x", TESTS),
    "floods the judge": ("def add(a, b): return 'x' * (20 << 20)", TESTS),
    "yields without end": (
        "def add(a, b):\n  while True: yield 0",
        ["assert 3 in add(1, 2)", "assert list(add(1, 2)) == [3]"],
    ),
    "sleeps": ("import time\ndef add(a, b): time.sleep(600)", TESTS),
    "takes all memory": ("def add(a, b): return len([0] * (1 << 40))", TESTS),
    "deletes files": (
        "import shutil\nfor p in ('/podium', '/tmp', '/usr'): shutil.rmtree(p, ignore_errors=True)",
        TESTS,
    ),
    "forks": ("import os\ndef add(a, b): return 3 if os.fork() == 0 else 0", TESTS),
    "calls back with code": (
        "def apply(f): return f('__import__(\"os\")._exit(0)') or 3",
        ["assert apply(eval) == 3", "assert apply(lambda x: x == 1) == 4"],
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_does_not_pass(name: str) -> None:
    program, tests = CHEATS[name]
    started = time.monotonic()
    assert score(program, tests, test_timeout_s=0.4, memory_mb=256) == 0.0
    assert time.monotonic() - started < 0.4 * len(tests) + 5  # a machine may be busy; what sleeps would take minutes


FOOL_A_JUDGE_IN_THE_SAME_PROCESS = [
    *("exits", "leaves at once", "exits when called", "leaves when called", "calls back with code"),
    *("an object equal to all", "an object close to all", "an object less than all", "an object that holds all"),
    *("an integer equal to all", "a text equal to all", "a list equal to all", "its own abs", "its own module"),
    *("a patched module", "its own counter"),
]


@pytest.mark.parametrize("name", FOOL_A_JUDGE_IN_THE_SAME_PROCESS)
def test_the_cheat_would_work_where_program_and_tests_share_a_process(name: str) -> None:
    program, tests = CHEATS[name]
    source = "\n".join(["import math", textwrap.dedent(program), *tests])
    assert subprocess.run([sys.executable, "-c", source], timeout=30, check=False).returncode == 0


def test_honest_answers_to_the_tests_of_the_cheats_pass() -> None:
    """So that the cheats do not fail only because nothing could pass."""
    honest = ADD + "def root(x): return x ** 0.5\n" + "def f(*a): return {(): 3}.get(a, {'a': 2, 'b': 1})\n"
    tests = ["assert add(1, 2) in [3]", "assert abs(root(2) - 1.414) < 0.01", "assert math.isclose(f(), 3)"]
    tests += ["assert f('aab') == Counter('aab')", "assert abs(add(1, 2) - 3) < 1e-6", "assert 2 <= add(1, 2) <= 4"]
    assert score(honest, [*TESTS, *tests]) == 1.0


def test_the_corpus_is_large_enough() -> None:
    assert len(CHEATS) >= 15


# ---- settings


@pytest.mark.parametrize(
    ("timeout_s", "options", "message"),
    [(8.0, {}, r"reward.timeout_s = 8 is not above total_s = 8"), (5.0, {"total_s": 6.0}, "total_s = 6")],
)
def test_a_time_limit_that_would_make_slow_programs_abstain_is_refused(
    timeout_s: float, options: dict[str, Any], message: str
) -> None:
    every = {"test_timeout_s": 2.0, "total_s": 8.0, "memory_mb": 512, "threshold": None, "sandbox": "weak"}
    with pytest.raises(InputError, match=message):
        code.refuse(timeout_s, **(every | options))
    code.refuse(10.0, **every)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (["assert add(1, 2) = 3"], "is no Python"),
        ([{"input": "1", "output": "2"}], "a test must be a text"),
        (17, "not a list of tests"),
        (None, "not a list of tests"),
        ([], "not a list of tests"),
    ],
)
def test_rows_whose_tests_cannot_be_run_are_found_before_the_run(answer, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        code.check_answer(Row.from_text("Write add.", answer=answer))  # type: ignore[attr-defined]
    code.check_answer(Row.from_text("Write add.", answer=["assert add(1, 2) == 3"]))  # type: ignore[attr-defined]
