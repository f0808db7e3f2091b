"""From a name in the settings to the thing it names, and from that thing's signature to its options.

`loss.name = "grpo"` is the object `grpo` of `podium/loss/grpo.py`; `"my_pkg.rewards:mine"` and `"./rewards.py:mine"`
reach user code. Keyword-only arguments of the object are its options; their annotations validate the values. The
positional ones are what the runtime hands in, so they can never be set from a file.
"""

import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ConfigDict, ValidationError, create_model
from pydantic.fields import FieldInfo

from podium.errors import InputError
from podium.records import EngineTraits
from podium.settings.contracts import signature_of

MAX_SHOWN = 200
OF_A_UNION = re.compile(
    r"[A-Z]|(literal|tuple|list|dict|constrained|function|is-instance)\b[\[-]|(int|float|str|bool)$"
)
"""What pydantic puts into the path of a field that may have one of several types; keys begin with a small letter."""
STAGES = (
    "data",
    "rollout",
    "tool",
    "environment",
    "engine",
    "reward",
    "advantage",
    "loss",
    "trainer",
    "sync",
    "report",
    "runtime",
)
"""Folders whose files are choices."""
NO_CHOICES = ("build", "objective")
"""Files of such a folder that build the stage, or hold what users' own choices import."""


def choices(stage: str) -> list[str]:
    """Names that the stage offers: its files, except those with shared code, which have an underscore, are in a
    sub-folder or are listed in `NO_CHOICES`."""
    folder = Path(__file__).parents[1] / stage
    files = [name for _, name, is_folder in pkgutil.iter_modules([str(folder)]) if not is_folder]
    return sorted(name for name in files if name not in NO_CHOICES and not name.startswith("_"))


def find(stage: str, name: str, where: str | None = None) -> Callable[..., Any]:
    """The function or class that `name` stands for; `where` is the key that names it, by default the stage's name."""
    where = where or f"{stage}.name"
    if ":" in name:
        return _find_user_object(where, name)
    if name not in choices(stage):
        valid = _valid(name, choices(stage))
        raise InputError(f"{where} = {shown(repr(name))} is not known; {valid}, or a 'module:object'")
    module = importlib.import_module(f"podium.{stage}.{name}")
    wanted = name.replace("_", "")
    for attribute, thing in vars(module).items():
        own = getattr(thing, "__module__", None) == module.__name__
        if own and callable(thing) and attribute.replace("_", "").lower() == wanted:
            return thing
    raise AssertionError(f"{module.__name__} defines no {name}")


def option_fields(thing: Callable[..., Any], where: str = "") -> dict[str, tuple[Any, Any]]:
    """The options of a function or class: name → (annotation, default), `...` where there is none."""
    signature = signature_of(where or _title(thing), thing)
    return {
        parameter.name: (
            Any if parameter.annotation is parameter.empty else parameter.annotation,
            ... if parameter.default is parameter.empty else parameter.default,
        )
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


def validate_options(where: str, thing: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of `thing`, those given checked and the others at their defaults."""
    fields = option_fields(thing, where)
    for key in given:
        if key not in fields:
            valid = _valid(key, sorted(fields))
            raise InputError(f"{where}.{shown(key)} is not an option of {_title(thing)}; {valid}")
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)
    model = create_model("Options", __config__=config, **fields)  # type: ignore[call-overload]
    try:
        made = dict(model(**given))
    except ValidationError as error:
        raise InputError(describe(error, where)) from None
    refuse_mixed_up(given, made, where)
    return made


def refuse_mixed_up(given: Any, made: Any, where: str) -> None:
    """Raises `InputError` for true in place of 1 and the reverse: pydantic accepts both."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            own = made.get(key) if isinstance(made, Mapping) else getattr(made, str(key), None)
            refuse_mixed_up(value, own, f"{where}.{key}".strip("."))
    elif isinstance(given, list) and isinstance(made, (list, tuple)):
        for index, (value, own) in enumerate(zip(given, made, strict=False)):
            refuse_mixed_up(value, own, f"{where}[{index}]")
    elif isinstance(given, bool) and isinstance(made, (int, float)) and not isinstance(made, bool):
        raise InputError(f"{where} = {str(given).lower()}: input should be a number")
    elif isinstance(given, (int, float)) and isinstance(made, bool) and not isinstance(given, bool):
        raise InputError(f"{where} = {given}: input should be true or false")


def engine_traits(name: str) -> EngineTraits:
    """Of the engine of that name, before one exists. A function that makes an engine may have `traits` too."""
    traits = getattr(find("engine", name), "traits", None)
    return traits if isinstance(traits, EngineTraits) else EngineTraits(channels=("shared",))


def engines_in_workers() -> list[str]:
    """Podium's engines that a pool, Ray or Flyte can start in a process of its own."""
    return [name for name in choices("engine") if engine_traits(name).runs_in_worker]


def option_help(thing: Callable[..., Any]) -> list[tuple[str, str, str]]:
    """(name, default, description) of each option, for `podium list`."""
    return [
        (name, "required" if default is ... else repr(default), _description(annotation))
        for name, (annotation, default) in option_fields(thing).items()
    ]


def _description(annotation: Any) -> str:
    """The help of an option, which may belong to one type of a union."""
    own = FieldInfo.from_annotation(annotation).description
    inner = (_description(each) for each in get_args(annotation) if get_origin(each) is Annotated)
    return own or next(filter(None, inner), "")


def describe(error: ValidationError, where: str) -> str:
    """The first complaint of pydantic as one line: field, value, what was expected."""
    first = error.errors()[0]
    parts = [
        str(part) for part in first["loc"] if first["type"] == "extra_forbidden" or not OF_A_UNION.match(str(part))
    ]
    field = ".".join([where, *parts]).strip(".")
    if first["type"] == "missing":
        return f"{field} is required"
    if not field:  # two fields that do not agree: the message names both
        return str(first.get("ctx", {}).get("error", first["msg"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{shown(field)} = {shown(repr(first['input']))}: {message[0].lower()}{message[1:]}"


def shown(text: str) -> str:
    """As much of a setting as a message needs."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}… ({len(text):,} characters)"


def _find_user_object(where: str, name: str) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise InputError(f"{where} = {shown(repr(name))} names no object; give module:object or path.py:object")
    try:
        module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    except (Exception, SystemExit) as error:  # whatever user code raises while it is imported
        raise InputError(
            f"{where} = {shown(repr(name))} cannot be imported: {type(error).__name__}: {shown(str(error))}; "
            "give module:object or path.py:object"
        ) from None
    registered = (thing for thing in vars(module).values() if getattr(thing, "registered_name", None) == attribute)
    thing = getattr(module, attribute, None) or next(registered, None)
    if not callable(thing):
        raise InputError(f"{where} = {shown(repr(name))}: {shown(place)} has no such function or class")
    return thing


def _load_module(place: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a console script does not have the working folder on its path
    return importlib.import_module(place)


def _load_file(path: Path) -> Any:
    """Each file once: it may be named at several places and may do something costly."""
    if not path.is_file():
        raise ModuleNotFoundError(f"no file {path} in {Path.cwd()}")
    return _load_file_once(path.resolve(), path.stat().st_mtime_ns)


@lru_cache
def _load_file_once(path: Path, _changed: int) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _valid(given: str, valid: list[str]) -> str:
    close = get_close_matches(given, valid, 1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(valid) if valid else 'none'}"


def _title(thing: Callable[..., Any]) -> str:
    """As settings name it: of Podium's own, the file."""
    module = getattr(thing, "__module__", None) or ""
    return module.rpartition(".")[2] if module.startswith("podium.") else getattr(thing, "__name__", str(thing))
