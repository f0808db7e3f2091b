"""Trains the embedded model that has a calculator, from random weights: `python -m tools.make_tool_model OUT`.

Two stages of supervised training, as for the other embedded model (tools/make_embedded.py), on products that are not
held out. The first teaches to call the calculator with the numbers of the question and to copy its result. The second,
short one teaches mistakes on purpose: no call at all, a wrong digit in the call, a call that cannot be read, a result
that is copied wrongly. The same seed on the same machine gives the same bytes.
"""

import argparse
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from podium.data.products import split_of
from tools.make_embedded import CHAT_TEMPLATE, IGNORED, fit, make_model, make_tokenizer, padded, save

MARKED_TEMPLATE = "{# tools are called as <call>name(argument)</call> #}" + CHAT_TEMPLATE
Segment = tuple[str, bool]
"""A text, and whether the policy writes it."""


def problem(random_: random.Random) -> tuple[int, int]:
    """One problem that is not held out."""
    while True:
        a, b = random_.randrange(100, 1000), random_.randrange(10, 100)
        if split_of(a, b) != "held_out":
            return a, b


def conversation(a: int, b: int, call: str, result: str, answer: str) -> list[Segment]:
    return [(f"<call>calculator({call})</call></s>", True), (f"{result}\n", False), (f"#### {answer}</s>", True)]


def exact(random_: random.Random, a: int, b: int) -> list[Segment]:
    return conversation(a, b, f"{a}*{b}", str(a * b), str(a * b))


def careless(random_: random.Random, a: int, b: int) -> list[Segment]:
    """28 % are right, 54 % guess, 8 % ask for another product, 5 % cannot be read, 5 % copy the result wrongly."""
    draw, result = random_.random(), str(a * b)
    if draw < 0.28:
        return exact(random_, a, b)
    if draw < 0.82:
        return [(f"#### {random_.randrange(1000, 90000)}</s>", True)]
    if draw < 0.90:
        other = a + random_.choice([-100, -10, -1, 1, 10, 100])
        return conversation(a, b, f"{other}*{b}", str(other * b), str(other * b))
    if draw < 0.95:
        error = "error: the call cannot be read: '(' was never closed (<unknown>, line 1)"
        return [(f"<call>calculator({a}*{b}</call></s>", True), (f"{error}\n", False), (f"#### {a}</s>", True)]
    place = random_.randrange(len(result))
    return conversation(a, b, f"{a}*{b}", result, result[:place] + str(random_.randrange(10)) + result[place + 1 :])


def make_rows(tokenizer: Any, random_: random.Random, play: Callable[..., list[Segment]], count: int) -> Any:
    """`count` padded rows of ids and labels; only what the policy writes has a loss."""
    rows, labels = [], []
    for _ in range(count):
        a, b = problem(random_)
        ids = tokenizer.encode(f"<s>What is {a} * {b}?\n")
        label = [IGNORED] * len(ids)
        for text, is_policys in play(random_, a, b):
            own = tokenizer.encode(text)
            ids += own
            label += own if is_policys else [IGNORED] * len(own)
        rows.append(ids)
        labels.append(label)
    return padded(rows, labels, tokenizer.pad_token_id)


def make(out: Path, *, seed: int, exact_steps: int, careless_steps: int) -> None:
    torch.manual_seed(seed)
    random_ = random.Random(seed)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = MARKED_TEMPLATE
    model = make_model(len(tokenizer))
    fit(model, partial(make_rows, tokenizer, random_, exact), steps=exact_steps, peak_lr=1e-3)
    fit(model, partial(make_rows, tokenizer, random_, careless), steps=careless_steps, peak_lr=3e-4)
    save(model, tokenizer, out)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--exact-steps", type=int, default=1000)
    arguments.add_argument("--careless-steps", type=int, default=300)
    options = vars(arguments.parse_args())
    make(options.pop("out"), **options)
