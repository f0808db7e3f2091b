"""Rewards that misbehave in every way we know of. The prompt's answer names the misdeed, a rollout of "bad" does it.

`KINDS` says what each must lead to: "late", "dead", "full" and "garbled" (the worker ends and the rollout abstains),
"raised" (the rollout abstains, the worker lives), "breach" (the run stops).
"""

import asyncio
import ctypes
import decimal
import fractions
import math
import os
import random
import re
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from podium import declare_range
from podium.records import Prompt, Rollout
from podium.remote.fork_server import DONE, LENGTH

MISDEEDS: dict[str, Callable[[], Any]] = {}
KINDS: dict[str, str] = {}


def misdeed(kind: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        name = function.__name__.replace("_", " ")
        MISDEEDS[name], KINDS[name] = function, kind
        return function

    return add


@declare_range(0.0, 1.0)
def hostile(prompt: Prompt, rollout: Rollout) -> Any:
    return MISDEEDS[prompt.answer]() if rollout.text == "bad" else 1.0


@declare_range(0.0, 1.0)
async def hostile_together(prompt: Prompt, rollout: Rollout) -> Any:
    await asyncio.sleep(0.01)
    return MISDEEDS[prompt.answer]() if rollout.text == "bad" else 1.0


@declare_range(0.0, 1.0)
def hostile_batched(prompt: Prompt, rollouts: tuple[Rollout, ...]) -> Any:
    if prompt.answer in LISTS:
        return LISTS[prompt.answer](len(rollouts))
    return [hostile(prompt, rollout) for rollout in rollouts]


class ShortList(list):
    def __len__(self) -> int:
        return 4


LISTS: dict[str, Callable[[int], Any]] = {
    "one too few": lambda count: [1.0] * (count - 1),
    "one too many": lambda count: [1.0] * (count + 1),
    "none at all": lambda count: [],
    "a single number": lambda count: 1.0,
    "None for all": lambda count: None,
    "a table": lambda count: dict.fromkeys(range(count), 1.0),
    "an array": lambda count: np.ones(count),
    "a generator": lambda count: (1.0 for _ in range(count)),
    "a text": lambda count: "1" * count,
    "nested": lambda count: [[1.0] * count],
    "a list that lies about its length": lambda count: ShortList([1.0] * 7),
}

# ---- too late


@misdeed("late")
def sleeps():
    time.sleep(600)


@misdeed("late")
def loops_for_ever():
    while True:
        pass


@misdeed("late")
def evil_regular_expression():
    re.match(r"(a+)+$", "a" * 60 + "b")


@misdeed("late")
def power_tower():
    return 7 ** (7**9)


@misdeed("late")
def factorial_of_a_big_number():
    return math.factorial(10**8)


@misdeed("late")
def sleeps_in_c_with_the_lock_of_the_interpreter():
    ctypes.PyDLL(None).sleep(600)


@misdeed("late")
def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@misdeed("late")
def waits_for_a_thread_that_never_ends():
    thread = threading.Thread(target=time.sleep, args=(600,))
    thread.start()
    thread.join()


@misdeed("late")
def reads_what_nobody_writes():
    os.read(os.pipe()[0], 1)


@misdeed("late")
def ignores_every_signal():
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


@misdeed("late")
def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


@misdeed("late")
def child_keeps_the_socket_open_while_the_parent_sleeps():
    os.fork()
    time.sleep(600)


@misdeed("late")
def swallows_its_own_death():
    while True:
        try:
            time.sleep(600)
        except BaseException:
            continue


@misdeed("late")
def forks_until_it_is_stopped():
    for _ in range(2000):
        if os.fork() == 0:
            time.sleep(600)
    time.sleep(600)


@misdeed("late")
def waits_for_nothing():
    select.select([], [], [])


@misdeed("late")
def serves_a_port():
    server = socket.create_server(("127.0.0.1", 0))
    server.accept()


# ---- dead


@misdeed("dead")
def reads_address_0():
    ctypes.string_at(0)


@misdeed("dead")
def leaves_with_code_0():
    os._exit(0)


@misdeed("dead")
def leaves_with_code_7():
    os._exit(7)


@misdeed("dead")
def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@misdeed("dead")
def kills_its_group():
    os.killpg(0, signal.SIGTERM)


@misdeed("dead")
def aborts():
    os.abort()


@misdeed("dead")
def overflows_the_stack():
    sys.setrecursionlimit(10**9)

    def deeper(n: int) -> int:
        return sum(map(deeper, [n + 1]))

    deeper(0)


@misdeed("dead")
def closes_every_file():
    os.closerange(3, 1000)
    return 1.0


@misdeed("dead")
def interrupts():
    raise KeyboardInterrupt


@misdeed("garbled")
def writes_into_every_socket():
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"[0, 'value', 1.0]\n")
        except OSError:
            continue
    time.sleep(600)


@misdeed("garbled")
def writes_a_line_that_never_ends():
    for descriptor in range(3, 64):
        try:
            while os.write(descriptor, b"[" * 65536):
                pass
        except OSError:
            continue
    time.sleep(600)


@misdeed("garbled")
def writes_values_of_other_rollouts():
    value = DONE + b'[99, "value", 1.0]'
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, LENGTH.pack(len(value)) + value)
        except OSError:
            continue
    time.sleep(600)


@misdeed("garbled")
def writes_a_reply_of_no_kind():
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, LENGTH.pack(3) + b"???")
        except OSError:
            continue
    time.sleep(600)


@misdeed("garbled")
def writes_a_number_that_is_no_text():
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\xff\xfe\x00\n")
        except OSError:
            continue
    time.sleep(600)


@misdeed("dead")
def burns_processor_time_beyond_its_limit():
    resource.setrlimit(resource.RLIMIT_CPU, (0, 0))
    while True:
        pass


# ---- raised


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("not even my name")


@misdeed("raised")
def raises_a_key_error():
    raise KeyError("nope")


@misdeed("raised")
def exits():
    sys.exit(0)


@misdeed("raised")
def raises_outside_of_exception():
    raise BaseException("as math-verify does")


@misdeed("raised")
def raises_something_without_a_text():
    raise Unspeakable


@misdeed("raised")
def recurses():
    return recurses()


@misdeed("full")
def takes_all_memory():
    return float(len(bytearray(1 << 40)))


@misdeed("full")
def takes_memory_bit_by_bit():
    hoard = []
    while True:
        hoard.append(bytearray(1 << 26))


@misdeed("raised")
def writes_a_huge_file():
    with open("/dev/null") as _, open(f"/tmp/podium-hostile-{os.getpid()}", "wb") as file:
        os.unlink(file.name)
        os.posix_fallocate(file.fileno(), 0, 2 << 30)
    return 1.0


@misdeed("raised")
def opens_files_without_end():
    return [open("/dev/null") for _ in range(10**6)]


@misdeed("raised")
def waits_for_standard_input():
    return float(input())


@misdeed("raised")
def abstains_with_an_error_of_a_million_letters():
    raise ValueError("x" * 10**6)


# ---- breach of contract


class Liar(float):
    """In range for whoever asks, and something else as soon as it is a plain number."""

    def __abs__(self) -> float:
        return 0.5

    def __le__(self, other: object) -> bool:
        return True

    def __ge__(self, other: object) -> bool:
        return True

    def __float__(self) -> float:
        return float("nan")


class Nameless:
    def __repr__(self) -> str:
        raise RuntimeError


RETURNS: dict[str, Any] = {
    "returns nan": float("nan"),
    "returns inf": float("inf"),
    "returns minus inf": float("-inf"),
    "returns 1e30": 1e30,
    "returns a negative number": -0.5,
    "returns an integer beyond floats": 10**400,
    "returns an integer beyond texts": 10**5000,
    "returns True": True,
    "returns False": False,
    "returns a text": "1.0",
    "returns an empty text": "",
    "returns bytes": b"1",
    "returns a list": [1.0],
    "returns a tuple": (1.0,),
    "returns a table": {"reward": 1.0},
    "returns a set": {1.0},
    "returns a complex number": 1 + 0j,
    "returns a decimal": decimal.Decimal(1),
    "returns a fraction": fractions.Fraction(1, 2),
    "returns an array": np.array(1.0),
    "returns a float32": np.float32(1),
    "returns a bool of numpy": np.bool_(True),
    "returns an object": object(),
    "returns a class": float,
    "returns a function": len,
    "returns a generator": (x for x in "a"),
    "returns an object without a text": Nameless(),
    "returns a number that lies": Liar(0.5),
    "returns a text of a million letters": "x" * 10**6,
}
for _name, _value in RETURNS.items():
    MISDEEDS[_name], KINDS[_name] = lambda value=_value: value, "breach"


# ---- harmless, but not tidy


def untidy(prompt: Prompt, rollout: Rollout) -> float:
    """Changes everything that it can reach; 1.0 only if it finds nothing changed."""
    found_clean = prompt.metadata == {"list": [1, 2]} and prompt.answer == ["a"]
    prompt.metadata["list"].clear()
    prompt.answer.append("b")
    os.chdir("/")
    os.environ["PODIUM_UNTIDY"] = "1"
    random.seed(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.path.insert(0, "/nowhere")
    print("noise on standard output")
    return float(found_clean)


HOARD: list[bytearray] = []


def leaks(prompt: Prompt, rollout: Rollout) -> float:
    HOARD.append(bytearray(100 << 20))
    return 1.0


def process_number(prompt: Prompt, rollout: Rollout) -> float:
    time.sleep(0.2)
    return float(os.getpid())


def draws(prompt: Prompt, rollout: Rollout) -> float:
    return random.random()


def narrows_its_context(prompt: Prompt, rollout: Rollout) -> float:
    """The precision that it found, which it then changes for whoever comes after."""
    found = decimal.getcontext().prec
    decimal.getcontext().prec = 3
    return float(found)


def leaves_a_daemon(prompt: Prompt, rollout: Rollout) -> float:
    """A child of a child in a session of its own, its number in a file; then the worker dies."""
    if os.fork() == 0:
        os.setsid()
        if (daemon := os.fork()) == 0:
            time.sleep(600)
        with open(f"{prompt.answer}.{os.getpid()}", "w") as file:
            file.write(str(daemon))
        os.replace(file.name, prompt.answer)  # whole or not at all: a second try may be killed while it writes
        os._exit(0)
    while not os.path.exists(prompt.answer):
        time.sleep(0.01)
    os._exit(3)


def kills_the_fork_server(prompt: Prompt, rollout: Rollout) -> float:
    """Once: the file tells whether it did already."""
    if not os.path.exists(prompt.answer):
        with open(prompt.answer, "w"):
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
    return 1.0


def dies_once(prompt: Prompt, rollout: Rollout) -> float:
    if not os.path.exists(prompt.answer):
        with open(prompt.answer, "w"):
            os._exit(1)
    return 1.0
