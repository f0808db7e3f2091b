"""The first process in the sandbox, and the tested program in a process of its own with restricted rights.

The standard input of the first process holds the program and then the tests.
`asserts`: the program's process is forked before the tests are read; this process becomes the judge.
`stdio`: each case is a fresh process; its output is sent out and judged outside the sandbox.
"""

from __future__ import annotations

import _operator
import builtins
import os
import select
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket

from .judge import SIGKILL, judge
from .limits import ask_before_threads, give_up_rights, hide_from_others
from .plain import decode, encode, from_plain, plain, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

READY = "ready"
MAX_GIVEN = 1 << 30
OUTSIDE = 1
"""Verdicts and outputs go to standard output, which no tested program has."""


def main() -> None:
    given = from_plain(receive(0, MAX_GIVEN))
    hide_from_others()
    given["has_threads"] = _hand_out_questions(given["supervisor"])
    send(OUTSIDE, plain(READY))
    if given["mode"] == "asserts":
        _asserts(given)
    else:
        _stdio(given)


def _hand_out_questions(supervisor: int) -> bool:
    """Lets the process outside answer whether a program may start a thread; False if no program may start any."""
    descriptor = ask_before_threads()
    rights = [] if descriptor is None else [(SOL_SOCKET, SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))]
    outside = socket(AF_UNIX, SOCK_STREAM, 0, supervisor)
    outside.sendmsg([b"threads"], rights)
    outside.close()
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is not None


def _asserts(given: dict[str, Any]) -> None:
    questions_out, questions_in = os.pipe()
    answers_out, answers_in = os.pipe()
    program = os.fork()
    if program == 0:
        try:
            os.close(questions_in)
            os.close(answers_out)
            silence()
            give_up_rights(given["memory_mb"], given["total_s"], given["output_bytes"], given["has_threads"])
            Program(given["program"], questions_out, answers_in).serve()
        finally:
            os._exit(0)
    os.close(questions_out)
    os.close(answers_in)
    tests = from_plain(receive(0, MAX_GIVEN))
    judge(tests, program, questions_in, answers_out, given["test_timeout_s"], OUTSIDE)


def _stdio(given: dict[str, Any]) -> None:
    for text in from_plain(receive(0, MAX_GIVEN)):
        code, output = _run_case(given, text)
        send(OUTSIDE, plain([code, output]))


def _run_case(given: dict[str, Any], text: str) -> tuple[int | None, bytes]:
    """(exit code, or None if the time was up; the output). Uses files in memory: a full pipe would block."""
    source, sink = os.memfd_create("input"), os.memfd_create("output")
    with open(source, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(source, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        _become_program(given, source, sink)
    code = _exit_code(pid, given["test_timeout_s"])
    output = os.pread(sink, given["output_bytes"], 0)
    os.close(source)
    os.close(sink)
    return code, output


def _become_program(given: dict[str, Any], source: int, sink: int) -> NoReturn:
    """Runs the program and exits as Python does: waits for threads, flushes files, exit code 1 after an error."""
    silence()
    os.dup2(source, 0)
    os.dup2(sink, 1)
    os.closerange(3, 64)
    give_up_rights(given["memory_mb"], given["test_timeout_s"], given["output_bytes"], given["has_threads"])
    execute(given["program"], "__main__")
    sys.exit()


def _exit_code(pid: int, limit_s: float) -> int | None:
    life = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(life, select.POLLIN)
    in_time = bool(poll.poll(limit_s * 1000))
    os.kill(pid, SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(life)
    return os.waitstatus_to_exitcode(status) if in_time else None


# ---- the tested program


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
        special: dict[str, Callable[..., Any]] = {
            "name": self._namespace.__getitem__,
            "can tell": lambda thing: hasattr(type(thing), "__contains__"),
            "enter": lambda thing: type(thing).__enter__(thing),
            "exit": leave,
            "equal": lambda one, other: bool(one == other),
        }
        operation = special.get(kind) or getattr(_operator, kind, None) or getattr(builtins, kind)
        return [operation(*given)]

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
