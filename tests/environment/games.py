"""Tools and environments as users write them, good and bad ones."""

import asyncio
import os
import time
from pathlib import Path

from podium import Observation


def add(a: int, b: int = 1) -> int:
    """Adds two whole numbers.

    This paragraph is not for the policy.
    """
    return a + b


async def slow_add(a: int, b: int, *, seconds: float = 0.05) -> int:
    """Adds, later."""
    await asyncio.sleep(seconds)
    return a + b


def broken(text: str) -> str:
    """Raises."""
    raise KeyError("gone")


def hangs() -> str:
    """Never returns."""
    while True:
        pass


def floods() -> bytes:
    """Ten megabytes that are no UTF-8."""
    return b"\xff" * 10_000_000


def ends() -> str:
    """Writes what ends a turn."""
    return "a</s>b"


def dies() -> str:
    """Ends its own process."""
    os._exit(3)


class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, by: int = 1) -> int:
        self.count += by
        return self.count


class Retry:
    """Says whether a sum is right, and lets the policy try again."""

    def reset(self, prompt):
        self.answer, self.turns = str(prompt.answer), 0

    def step(self, reply):
        self.turns += 1
        if reply.rpartition("####")[2].strip() == self.answer:
            return Observation(reward=1.0, done=True)
        return Observation("Wrong. Again.", done=self.turns == 3)


class Opening(Retry):
    """Says something first."""

    def reset(self, prompt):
        super().reset(prompt)
        return [{"role": "user", "content": "Now."}]


class Raises(Retry):
    def step(self, reply):
        raise RuntimeError("the game is broken")


class Sleeps(Retry):
    def step(self, reply):
        time.sleep(60)


class Exits(Retry):
    def step(self, reply):
        os._exit(1)


class Nonsense(Retry):
    def step(self, reply):
        return 7


class Endless(Retry):
    def step(self, reply):
        return "Go on."


class Unsteady(Retry):
    """Its first message differs from episode to episode."""

    def reset(self, prompt):
        super().reset(prompt)
        return os.urandom(8).hex()


class OpensOnce(Retry):
    """Only its first episode begins with a message."""

    def __init__(self, *, mark: Path) -> None:
        self.mark = mark

    def reset(self, prompt):
        super().reset(prompt)
        try:
            self.mark.open("x").close()
        except FileExistsError:
            return None
        return "Now."


class Talkative(Retry):
    """Begins with more than an episode may read."""

    def reset(self, prompt):
        super().reset(prompt)
        return "x" * 500


class Closes(Retry):
    """Notes each episode that it closes; shows what it is asked."""

    def __init__(self, *, notes: Path) -> None:
        self.notes = notes

    def reset(self, prompt):
        super().reset(prompt)
        self.asked = [turn["content"] for turn in prompt.messages]

    def step(self, reply):
        return Observation(str(self.asked), reward=0.5, done=reply != "again", info={"steps": 1, "who": "me"})

    def close(self):
        with self.notes.open("a") as file:
            file.write("closed\n")


class HangsOnce:
    """Hangs in the first call that an episode's process gets, unless it was told not to."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, wait: bool = False) -> int:
        self.count += 1
        if wait:
            time.sleep(60)
        return self.count


class SlowClose(Counter):
    """Counts its calls, and takes long to close."""

    def close(self) -> None:
        time.sleep(3)


def keeps(path: str, *, folder: Path, names: tuple[str, ...] = ("a", "b")) -> str:
    """Has options that a settings file writes as text and as a list."""
    return f"{(folder / path).name} {type(folder).__name__} {names}"
