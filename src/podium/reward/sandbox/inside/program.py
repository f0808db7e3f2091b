"""The tested program, in a process with restricted rights: run as a script, or kept to answer a judge's questions."""

from __future__ import annotations

import builtins
import os
import sys

from .plain import decode, encode, plain, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def silence() -> None:
    """Connects descriptors 0, 1 and 2 to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)


def execute(source: str, name: str) -> dict[str, Any]:
    """Runs the program as a module called `name` and returns its namespace."""
    module = type(sys)(name)
    sys.modules[name] = module
    exec(compile(source, "<program>", "exec"), module.__dict__)
    return module.__dict__


class Program:
    """Answers a judge's questions about a program."""

    def __init__(self, source: str, questions: int, answers: int) -> None:
        self._source, self._questions, self._answers = source, questions, answers
        self._namespace: dict[str, Any] = {}
        self._things: list[Any] = []

    def serve(self) -> None:
        """Runs the program and answers questions until the judge closes the connection."""
        try:
            self._namespace = execute(self._source, "program")
        except BaseException as error:
            send(self._answers, raised(error))
            return
        send(self._answers, plain(["is", [name for name in self._namespace if not name.startswith("__")]]))
        self._answer_until_reply()

    def call_back(self, number: int, positional: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function of the test in the judge's process; that function may ask the program meanwhile."""
        send(self._answers, encode(["call back", number, positional, named], self._refer))
        kind, *content = self._answer_until_reply()
        if kind == "raised":
            raise RuntimeError(": ".join(content))
        return content[0]

    def _answer_until_reply(self) -> list[Any]:
        while True:
            kind, *given = decode(receive(self._questions), self._dereference)
            if kind in ("is", "raised"):
                return [kind, *given]
            try:
                reply = encode(["is", *self._answer(kind, given)], self._refer)
            except StopIteration:
                reply = plain(["end"])
            except BaseException as error:
                reply = raised(error)
            send(self._answers, reply)

    def _answer(self, kind: str, given: list[Any]) -> list[Any]:
        if kind == "call":
            thing, positional, named = given
            before = encode(positional, self._refer)
            value = thing(*positional, **named)
            has_changed = encode(positional, self._refer) != before
            return [value, list(positional) if has_changed else None]  # arguments may be changed in place
        operations: dict[str, Callable[..., Any]] = {
            "name": self._namespace.__getitem__,
            "attribute": getattr,
            "set attribute": setattr,
            "item": lambda thing, key: thing[key],
            "set item": lambda thing, key, value: thing.__setitem__(key, value),
            "delete item": lambda thing, key: thing.__delitem__(key),
            "contains": lambda thing, value: value in thing,
            "can tell": lambda thing: hasattr(type(thing), "__contains__"),
            "enter": lambda thing: type(thing).__enter__(thing),
            "exit": leave,
            "iterate": iter,
            "next": next,
            "length": len,
            "truth": bool,
            "equal": lambda one, other: bool(one == other),
            "text": str,
            "representation": repr,
        }
        return [operations[kind](*given)]

    def _refer(self, thing: Any) -> int:
        self._things.append(thing)
        return len(self._things) - 1

    def _dereference(self, number: int) -> Any:
        """Negative numbers are functions of the test."""
        if number >= 0:
            return self._things[number]
        return lambda *positional, **named: self.call_back(number, positional, named)


def leave(thing: Any, name: str | None, text: str) -> None:
    """Ends a `with` of the test; `name` is the class of the error that ended it. The return value of `__exit__` does
    not count, because it could suppress a failed assertion."""
    kind = getattr(builtins, str(name), Exception)
    error = None if name is None else kind(text)
    type(thing).__exit__(thing, error and kind, error, None)


def raised(error: BaseException) -> bytes:
    try:
        return plain(["raised", type(error).__name__, str(error)[:1000]])
    except BaseException:
        return plain(["raised", "Exception", ""])
