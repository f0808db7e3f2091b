"""Runs tests against a program that lives in another process.

A test is ordinary Python. The names of the program that it uses are stand-ins here: calling one sends the arguments
over and brings the value back, as plain data or as a stand-in again. So every comparison happens in this process, which
the program cannot reach, and the program never sees what is expected of it. A stand-in equals nothing but what the
program says of another of its own things; arithmetic and order it does not have. What it says to hold counts unless it
says so of everything, and as the object of a `with` it cannot swallow the test's errors.
"""

from __future__ import annotations

import builtins
import os
import select
import sys
import time

from ._plain import decode, encode, plain, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

OWN_NAMES = {"isclose": "math"} | dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections")
"""What tests use without importing it and programs must not redefine for them; as all built-in names."""
SIGKILL = 9
TEST = "<test>"
Code = type((lambda: None).__code__)


class Stuck(BaseException):
    """The program did not answer in time, or at all, or what no program of ours would."""


class ProgramError(Exception):
    """An error of a class that only the program knows."""


class Link:
    """Questions to the program."""

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
        """What the next reply holds, with the program's errors raised here.

        Only the question for a next item may be answered by the end: raised anywhere else, it would end a loop of the
        test's own, such as `all(map(f, cases))`, before anything is compared.
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
        """The program calls a function that the test gave it."""
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
        """Functions that the test itself defines may be handed over; no others, lest the program gets `eval`."""
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
    """Stands for something of the program's that is not plain data."""

    def __init__(self, link: Link, number: int) -> None:
        self.__dict__.update(_link=link, _number=number)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._link.ask("call", self, positional, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("attribute", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("set attribute", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._link.ask("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.ask("set item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._link.ask("delete item", self, key)

    def __contains__(self, value: Any) -> bool:
        if self._link.ask("can tell", self) is not True:
            return any(value is each or value == each for each in self)
        asked = [value, *decoys()]
        asked.sort(key=lambda _: os.urandom(8))  # which of them the test asks for is not to be known
        told = [self._says_to_hold(each) for each in asked]
        return not all(told) and told[next(place for place, each in enumerate(asked) if each is value)]

    def _says_to_hold(self, value: Any) -> bool:
        try:
            return self._link.ask("contains", self, value) is True
        except Exception:  # it may be that only values of one kind can be looked for
            return False

    def __enter__(self) -> Any:
        return self._link.ask("enter", self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._link.ask("exit", self, kind and kind.__name__, str(error))

    def __next__(self) -> Any:
        """The end is an error here: `StopIteration` would end a loop of the test's own."""
        try:
            return self._link.ask("next", self)
        except StopIteration:
            raise ProgramError("StopIteration") from None

    def __iter__(self) -> Iterator[Any]:
        iterator = self._link.ask("iterate", self)
        while True:
            try:
                yield self._link.ask("next", iterator)
            except StopIteration:
                return

    def __len__(self) -> int:
        return self._link.ask("length", self)

    def __bool__(self) -> bool:
        return self._link.ask("truth", self) is True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self._link.ask("equal", self, other) is True

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return self._link.ask("text", self)

    def __repr__(self) -> str:
        return self._link.ask("representation", self)


def decoys() -> list[Any]:
    """Values that nobody has put into anything: one that says to hold them all says so of everything."""
    number = int.from_bytes(os.urandom(7), "little")
    return [number, -number - 1, number + 0.5, f"{number:x}"]


def judge(tests: list[Any], program: int, questions: int, answers: int, limit_s: float, verdicts: int) -> None:
    """Writes a word a test: passed or failed. The last may be "stuck", where the program must be started anew for the
    other tests, or "broken", where it did not even get so far as to be tested."""
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
    """Whether the test runs through, and asked the program for anything at all."""
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
    """What the program did to an argument in place."""
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
