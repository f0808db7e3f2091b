"""Settings that nobody should write: a small good file with one or two values replaced by hostile ones."""

import copy
import datetime
import random
from collections.abc import Iterator
from typing import Any

from podium.settings.lookup import STAGES, choices, find, option_fields
from podium.settings.sections import SECTIONS
from podium.settings.tables import CHOICES

GOOD: dict[str, Any] = {
    "run": {"steps": 2, "prompts_per_step": 2, "rollouts_per_prompt": 2, "epochs": 50},
    "model": {"device": "cpu", "lora": {"r": 2}},
    "data": [{"name": "arithmetic", "max_rows": 8}],
    "reward": [{"name": "arithmetic"}],
    "rollout": {"max_new_tokens": 4},
    "trainer": {"lr": 1e-4},
    "pack": {"max_tokens_per_batch": 256},
    "eval": {"data": [{"name": "arithmetic", "split": "held_out", "max_rows": 2}]},
    "report": [{"name": "console"}],
}
OBJECTS = [
    "math:sqrt",
    "math:pi",
    "math:hypot",
    "builtins:print",
    "builtins:max",
    "builtins:int",
    "builtins:object",
    "builtins:dict",
    "builtins:len",
    "json:dumps",
    "os:getcwd",
    "os:environ",
    "sys:exit",
    "sys:path",
    "collections:deque",
    "collections:OrderedDict",
    "collections:Counter",
    "functools:partial",
    "operator:add",
    "random:random",
    "types:SimpleNamespace",
    "pathlib:Path",
    "podium.loss.grpo:grpo",
    "itertools:count",
    "podium.advantage.rloo:rloo",
    "podium.sync.shared:Shared",
    "podium.rollout.single_turn:SingleTurn",
    "no_such_module:thing",
    "math:nothing",
    "./no_file.py:f",
    ":",
    "a:",
    ":b",
    "math:",
    "..:x",
    "podium:train",
    "asyncio:sleep",
    "unittest.mock:MagicMock",
    "unittest.mock:sentinel",
]
NUMBERS = [0, -1, 1, 2, 3, 7, 10**6, 10**9, 10**18, 10**30, -(10**30), 0.0, -0.0, 0.5, 1.0, 1.5, -2.5, 1e-46, 1e-300]
NUMBERS += [1e18, 1e30, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 2**63, 2**64, 5e-324]
TEXTS = ["", " ", "x", "true", "0", "é🙂", "\u202eabc", "a\nb", "a\0b", "../..", "/", "/dev/null", "~", "x" * 100_000]
TEXTS += [
    "x/" * 3000,
    "k1",
    "embedded",
    "auto",
    "cpu",
    "cuda",
    "initial",
    "none",
    "grpo",
    "null",
    "%s%n",
    "$HOME",
    "[1",
]
OTHERS = [True, False, [], {}, [[]], [{}], [1], ["k1"], ["a", "b"], [True], [float("nan")], {"a": 1}, {"name": "x"}]
OTHERS += [{"a": {"b": {"c": [1, {"d": 2}]}}}, {"": 1}, {"é": "é"}, [0.5, 2.0], [1, 2, 3], [None], [10**30]]
OTHERS += [datetime.date(2026, 1, 1), datetime.datetime(2026, 1, 1, 12), datetime.time(1, 2)]
VALUES = [*NUMBERS, *TEXTS, *OBJECTS, *OTHERS]
ODD_KEYS = ["nothing", "", "é", "name.name", "Name", "steps ", "__class__", "model_config", "x" * 5000, "lr", "0"]


def places() -> list[tuple[str, ...]]:
    """Every key of every table that a run has, with the options of what its tables name."""
    found: list[tuple[str, ...]] = [("no_such_section",), ("",)]
    for section, model in SECTIONS.items():
        found += [(*section.split("."), key) for key in model.model_fields]
    for section in (*CHOICES, "data", "reward", "report"):
        found.append((section,))
        found += [(section, "name")] * 3
        given = GOOD.get(section, {})
        name = (given[0] if isinstance(given, list) else given).get("name") or _default(section)
        found += [(section, option) for option in option_fields(find(section, name))]
        found += [(section, key) for key in ODD_KEYS[len(found) % 5 :: 5]]
    found += [("data", "path"), ("eval", "data", "path")]
    return [*found, *((section,) for section in SECTIONS), ("eval", "data", "name"), ("model", "reference", "device")]


def _default(section: str) -> str:
    from podium.settings.tables import Settings

    name = Settings.model_fields[section].default.name
    return "shared" if name == "auto" else name


def cases(seed: int, count: int) -> Iterator[tuple[list[tuple[str, ...]], dict[str, Any]]]:
    """(the keys that were changed, the tables)."""
    rng, every = random.Random(seed), places()
    for _ in range(count):
        tables, changed = copy.deepcopy(GOOD), []
        for _ in range(rng.choice((1, 1, 1, 2))):
            place = rng.choice(every)
            value = (
                rng.choice(choices(place[0]))
                if place[-1] == "name" and rng.random() < 0.2 and place[0] in CHOICES
                else rng.choice(OBJECTS)
                if place[-1] in ("name", "accept") and rng.random() < 0.6
                else rng.choice(VALUES)
            )
            put(tables, place, value)
            changed.append(place)
        yield changed, tables


def a_value(rng: random.Random, place: tuple[str, ...]) -> Any:
    if place[-1] not in ("name", "accept"):
        return rng.choice(VALUES)
    names = [*OBJECTS, *(choices(place[0]) if place[0] in STAGES else ())]
    return rng.choice(names if rng.random() < 0.8 else VALUES)


def put(tables: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    at: Any = tables
    for part in place[:-1]:
        if isinstance(at, dict) and not isinstance(at.get(part), (dict, list)):
            at[part] = {}
        at = at[part]
        at = at[0] if isinstance(at, list) and at else at
    if isinstance(at, dict):
        at[place[-1]] = copy.deepcopy(value)
        if place[-1] == "path":
            at["name"] = "jsonl"
