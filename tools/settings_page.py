"""docs/settings.md, made from the code: `python -m tools.settings_page docs/settings.md`."""

import sys
import types
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from podium.settings.lookup import STAGES, choices, find, option_fields, option_help
from podium.settings.sections import SECTIONS
from podium.settings.tables import Settings

HEAD = """# Settings

Every key of a settings file, with its values, default and meaning. `podium list SECTION` prints the same, and
`podium show SETTINGS` a file with every default filled in. A key that does not exist, or would have no effect, is an
error.

A run with the default choice of every section has {few} options; all choices together have {all}.

This page is made from the code by `make docs`.
"""
SEVERAL = ("data", "tool", "reward", "report")
WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", dict: "table"}
TABLE = "| key | values | default | meaning |\n|---|---|---|---|"


def settings_reference() -> str:
    """The page."""
    every = list(dict.fromkeys([*SECTIONS, *STAGES]))
    return "\n".join([HEAD.format(few=len(default_path()), all=len(all_options())), *map(_section, every)])


def all_options() -> list[str]:
    """Every option by its dotted name, section.key or section.choice.key. A `name` that chooses a file does not count;
    of a table only its keys count."""
    of_choices = (_own(stage, name) for stage in STAGES for name in choices(stage))
    return [*_section_options(), *chain.from_iterable(of_choices)]


def default_path() -> list[str]:
    """The options of a run that keeps the default choice of every section, with the built-in data and reward."""
    made = Settings.from_dict({"reward": [{"name": "arithmetic"}]})
    chosen = [(stage, given) for stage in STAGES if (given := getattr(made, stage)) is not None]
    named = [(stage, each.name) for stage, given in chosen for each in (given if isinstance(given, list) else [given])]
    absent = [section for section in STAGES if getattr(made, section) is None]
    keys = [key for key in _section_options() if key.split(".")[0] not in absent]
    return [*keys, *(option for stage, name in named for option in _own(stage, name))]


def _section_options() -> list[str]:
    tables = {*SECTIONS, "eval.data"}
    keys = [f"{section}.{key}" for section, keys in SECTIONS.items() for key, _, _ in keys.key_help()]
    return [key for key in keys if key not in tables]


def _own(stage: str, name: str) -> list[str]:
    return [f"{stage}.{name}.{option}" for option in option_fields(find(stage, name))]


def _section(name: str) -> str:
    parts = [f"## `[[{name}]]`" if name in SEVERAL else f"## `[{name}]`", ""]
    if name in SEVERAL:
        parts += ["There may be several, one table each.", ""]
    if name in STAGES:
        parts += [f"`name` is one of {', '.join(f'`{each}`' for each in choices(name))}, or `file.py:object`.", ""]
    if section := SECTIONS.get(name):
        rows = [(key, section.model_fields[key].annotation, *rest) for key, *rest in section.key_help()]
        parts += [TABLE, *(_row(*row) for row in rows), ""]
    if name in STAGES:
        parts += [line for choice in choices(name) for line in _choice(name, choice)]
    return "\n".join(parts)


def _choice(stage: str, name: str) -> list[str]:
    """A choice of a stage, with its options."""
    thing = find(stage, name)
    title = (sys.modules[thing.__module__].__doc__ or "").strip().splitlines()[0]
    fields = option_fields(thing)
    rows = [_row(key, fields[key][0], default, help_) for key, default, help_ in option_help(thing)]
    return [f"### `{name}`", "", title, "", *([TABLE, *rows, ""] if rows else [])]


def _row(key: str, annotation: Any, default: str, help_: str) -> str:
    """Defaults as TOML writes them; an empty cell if there is no default."""
    as_toml = default.replace("'", '"').replace("True", "true").replace("False", "false")
    shown = "" if default in ("unset", "None") else default if default in ("required", "a table") else f"`{as_toml}`"
    cells = (f"`{key}`", kind(annotation), shown, help_)
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def kind(annotation: Any) -> str:
    """The possible values, in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind(inner[0])
    if origin is Literal:
        return ", ".join(f"`{value!r}`".replace("'", '"') for value in inner).replace("False", "false")
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(kind(each) for each in inner if each is not type(None)))
    if origin in (list, tuple):
        return "list of " + " and ".join(dict.fromkeys(kind(each) for each in inner if each is not ...))
    if isinstance(annotation, FieldInfo):
        return kind(annotation.annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    return WORDS.get(origin or annotation, "value")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(settings_reference(), encoding="utf-8")
