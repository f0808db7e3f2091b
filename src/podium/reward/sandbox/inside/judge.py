"""Runs tests against a program that lives in another process.

A test is ordinary Python. The program's names in it are stand-ins here: calling one sends the arguments to the program
and returns its value, as plain data or as a stand-in again. So every comparison happens in this process, which the
program cannot reach, and the program never sees what is expected. A stand-in can only equal another stand-in, if the
program says so; it has no arithmetic and no order. The program decides what a stand-in contains, unless it claims that
it contains everything. A stand-in in a `with` cannot suppress the test's errors.
"""

from __future__ import annotations

import builtins
import os
import select
import sys
import time

from .plain import decode, encode, plain, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

OWN_NAMES = {"isclose": "math"} | dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections")
"""Names that tests use without importing them. As with built-in names, a program cannot redefine them for a test."""
SIGKILL = 9
TEST = "<test>"
Code = type((lambda: None).__code__)


class Stuck(BaseException):
    """The program did not answer in time, or not in the protocol."""


class ProgramError(Exception):
    """An error whose class only the program knows."""


class Link:
    """The connection to the program, which answers questions."""

    def __init__(self, questions: int, answers: int) -> None:
        self._questions, self._answers = questions, answers
        os.set_blocking(questions, False)
        self._functions: list[Any] = []
        self.deadline = 0.0
        self.is_used = False

    def ask(self, kind: str, *given: Any) -> Any:
        self.is_used = True
        self._send([kind, *given])
        value, *changed = self.read(kind)
        if changed and isinstance(changed[0], list):
            for before, after in zip(given[1], changed[0]):  # noqa: B905
                _change(before, after)
        return value

    def read(self, question: str = "") -> list[Any]:
        """The content of the next reply; an error of the program is raised here.

        Only the question for a next item may be answered with `StopIteration`: raised anywhere else, it would end a
        loop of the test, such as `all(map(f, cases))`, before anything is compared.
        """
        while True:
            try:
                message = receive(self._answers, wait=lambda: self._wait(self._answers, select.POLLIN))
                kind, *content = decode(message, lambda number: Thing(self, number))
            except Exception:
                raise Stuck from None
            if kind == "raised":
                _raise(*content)
            if kind == "end":
                raise StopIteration if question == "next" else ProgramError("StopIteration")
            if kind != "call back":
                return content or [None]
            self._call_back(*content)

    def _call_back(self, number: int, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Calls a function of the test for the program."""
        try:
            self._send(["is", self._functions[-1 - number](*positional, **named)])
        except Exception as error:
            self._send(["raised", type(error).__name__, str(error)])

    def _send(self, message: list[Any]) -> None:
        data = encode(message, self._refer)
        try:
            send(self._questions, data, wait=lambda: self._wait(self._questions, select.POLLOUT))
        except OSError:
            raise Stuck from None

    def _refer(self, thing: Any) -> int:
        """The number of a stand-in or of a function that the test defines; others, such as `eval`, are refused."""
        if isinstance(thing, Thing):
            return thing.__dict__["_number"]
        if getattr(getattr(thing, "__code__", None), "co_filename", None) != TEST:
            raise TypeError(f"a test cannot hand a {type(thing).__name__} to the program")
        self._functions.append(thing)
        return -len(self._functions)

    def _wait(self, descriptor: int, event: int) -> None:
        poll = select.poll()
        poll.register(descriptor, event)
        left_s = self.deadline - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise Stuck


class Thing:
    """A stand-in for an object of the program that is not plain data."""

    def __init__(self, link: Link, number: int) -> None:
        self.__dict__.update(_link=link, _number=number)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._link.ask("call", self, positional, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("getattr", self, name)

    def __contains__(self, value: Any) -> bool:
        if self._link.ask("can tell", self) is not True:
            return any(value is each or value == each for each in self)
        asked = [value, *decoys()]
        asked.sort(key=lambda _: os.urandom(8))  # the program must not know which of them the test asks for
        answers = [self._says_to_hold(each) for each in asked]
        return not all(answers) and answers[next(place for place, each in enumerate(asked) if each is value)]

    def _says_to_hold(self, value: Any) -> bool:
        try:
            return self._link.ask("contains", self, value) is True
        except Exception:  # the container may only take values of one type
            return False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._link.ask("exit", self, kind and kind.__name__, str(error))

    def __next__(self) -> Any:
        """The end is an error here: `StopIteration` would end a loop of the test."""
        try:
            return self._link.ask("next", self)
        except StopIteration:
            raise ProgramError("StopIteration") from None

    def __iter__(self) -> Iterator[Any]:
        iterator = self._link.ask("iter", self)
        while True:
            try:
                yield self._link.ask("next", iterator)
            except StopIteration:
                return

    def __bool__(self) -> bool:
        return self._link.ask("bool", self) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self._link.ask("equal", self, other) is True

    __hash__ = object.__hash__


def _asks(kind: str) -> Callable[..., Any]:
    return lambda thing, *given: thing._link.ask(kind, thing, *given)


for question in ("setattr", "getitem", "setitem", "delitem", "enter", "len", "str", "repr"):
    setattr(Thing, f"__{question}__", _asks(question))  # methods that only pass the question on


def decoys() -> list[Any]:
    """Random values that no container has: one that claims to contain them all claims to contain everything."""
    number = int.from_bytes(os.urandom(7), "little")
    return [number, -number - 1, number + 0.5, f"{number:x}"]


def judge(tests: list[Any], program: int, questions: int, answers: int, limit_s: float, verdicts: int) -> None:
    """Writes one word per test: passed or failed. The last may be "stuck", if the program must be restarted for the
    other tests, or "broken", if the program failed before its first test."""
    sys.set_int_max_str_digits(0)
    link = Link(questions, answers)
    names: list[str] | None = None
    for source, modules in tests:
        link.deadline = time.monotonic() + limit_s
        try:
            if names is None:
                names = [str(name) for name in link.read()[0]]
            verdict = "passed" if _passes(source, modules, names, link) else "failed"
        except Stuck:
            verdict = "stuck"
        except BaseException:
            verdict = "failed"
        verdict = "broken" if names is None else verdict
        send(verdicts, plain(verdict))
        if verdict in ("stuck", "broken"):
            break
    os.kill(program, SIGKILL)


def _passes(source: str, modules: list[str], names: list[str], link: Link) -> bool:
    """Whether the test ends without an error and used the program at all."""
    code = compile(source, TEST, "exec")
    used = _used(code)
    namespace: dict[str, Any] = {"__name__": "test", "__builtins__": builtins}
    namespace |= {name: getattr(__import__(module), name) for name, module in OWN_NAMES.items() if name in used}
    for name in modules:
        try:
            namespace[name] = __import__(name)
        except ImportError:
            continue
    wanted = sorted((used & set(names)) - set(vars(builtins)) - set(namespace))
    for name in wanted:
        namespace[name] = link.ask("name", name)
    link.is_used = any(not isinstance(namespace[name], Thing) for name in wanted)
    exec(code, namespace)
    return link.is_used


def _used(code: Any) -> set[str]:
    return set(code.co_names).union(*(_used(each) for each in code.co_consts if isinstance(each, Code)))


def _change(before: Any, after: Any) -> None:
    """Repeats what the program did to an argument in place."""
    if type(before) is not type(after):
        return
    if isinstance(before, list):
        before[:] = after
    elif isinstance(before, (dict, set)):
        before.clear()
        before.update(after)


def _raise(name: Any, text: Any) -> NoReturn:
    kind = getattr(builtins, str(name), None)
    ends_loops = (StopIteration, StopAsyncIteration)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends_loops):
        raise kind(str(text))
    raise ProgramError(f"{name}: {text}")
