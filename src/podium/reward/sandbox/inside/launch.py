"""The first process in the sandbox. Its standard input holds the program and then the tests.

`asserts`: the program gets a process of its own, forked before the tests are read; this process becomes the judge.
`stdio`: each case is a fresh process; its output is sent out and judged outside the sandbox.
"""

from __future__ import annotations

import os
import select
import sys
from _socket import AF_UNIX, SCM_RIGHTS, SOCK_STREAM, SOL_SOCKET, socket

from .judge import SIGKILL, judge
from .limits import ask_before_threads, give_up_rights, hide_from_others
from .plain import from_plain, plain, receive, send
from .program import Program, execute, silence

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    outside = socket(AF_UNIX, SOCK_STREAM, 0, supervisor)
    if descriptor is not None:
        outside.sendmsg([b"threads"], [(SOL_SOCKET, SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))])
        os.close(descriptor)
    outside.close()
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
