"""The share of the label's instructions that the text follows: IFEval's 25, or the 25 functions of Tulu 3.

The label has one of two forms. IFEval: `{"instruction_id_list": […], "kwargs": [{…}, …]}` (also with `instruction_id`),
or these fields in the row itself if the row has no answer. Tulu 3: `{"func_name": …, …}`. Both may be written as JSON
or as a Python literal, and a list may hold several labels. An argument that is null counts as absent. An empty answer
follows no instruction.
"""

import ast
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from podium.errors import InputError
from podium.records import Prompt, Rollout, Row
from podium.reward.instructions.english import require_langdetect
from podium.reward.instructions.ifeval import ARGUMENTS, INSTRUCTIONS
from podium.reward.instructions.tulu3 import FUNCTIONS
from podium.reward.scoring.verifiers import (
    checks_answer,
    declare_range,
    gold_answer,
    judges_answer,
    without_answer_tags,
)

NEED_LANGDETECT = {
    "language:response_language",
    "change_case:english_capital",
    "change_case:english_lowercase",
    "validate_response_language",
}


@dataclass(frozen=True)
class Constraint:
    """One instruction that the text must follow."""

    function: Callable[..., bool]
    arguments: Mapping[str, Any]
    judged: Callable[[str], str]
    """The part of a text that is judged."""

    def is_followed(self, text: str) -> bool:
        """Whether the text follows the instruction; an empty answer does not."""
        text = self.judged(text)
        return bool(text.strip()) and self.function(text, **self.arguments)


def constraints(row: Row | Prompt) -> list[Constraint]:
    """The instructions of the row's label; `InputError` if the label cannot be used."""
    label = row.answer
    if label is None and "instruction_id_list" in row.metadata:
        label = dict(row.metadata)
    found = list(_read(label))
    if not found:
        raise InputError("the label names no instruction")
    return found


def _read(label: Any) -> Iterator[Constraint]:
    label = _parse(label) if isinstance(label, str) else label
    for each in label if isinstance(label, list) else [label]:
        entry = _parse(each) if isinstance(each, str) else each
        fields = entry if isinstance(entry, dict) else {}
        ids, kwargs = fields.get("instruction_id_list", fields.get("instruction_id")), fields.get("kwargs")
        if "func_name" in fields:
            arguments = {key: value for key, value in fields.items() if key != "func_name"}
            yield _constraint(FUNCTIONS, fields["func_name"], arguments, without_answer_tags)
        elif isinstance(ids, list) and isinstance(kwargs, list):
            if len(ids) != len(kwargs):
                raise InputError(f"{len(ids)} instructions have {len(kwargs)} kwargs; give each its own")
            for name, arguments in zip(ids, kwargs, strict=True):
                yield _constraint(INSTRUCTIONS, name, arguments or {}, str)
        else:
            raise InputError(
                "the label must have 'instruction_id_list' and 'kwargs' (IFEval) or 'func_name' (Tulu 3), "
                f"not {entry!r:.60}"
            )


def _parse(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    raise InputError(f"the label is neither JSON nor a Python literal: {text!r:.60}")


def _constraint(
    known: Mapping[str, Callable[..., bool]], name: Any, arguments: Any, judged: Callable[[str], str]
) -> Constraint:
    """The named function with its arguments checked."""
    if not isinstance(name, str) or name not in known:
        raise InputError(f"{name!r:.60} is not known; known: {', '.join(known)}")
    if not isinstance(arguments, Mapping):
        raise InputError(f"{name}: the arguments must be an object, not {arguments!r:.60}")
    function = known[name]
    if name in NEED_LANGDETECT:
        require_langdetect()
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        checked = dict(_arguments_model(function)(**given))
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from None
    for nth, count in (("nth_paragraph", "num_paragraphs"), ("i", "N")):
        if nth in checked and checked[nth] > checked[count]:
            raise InputError(f"{name}: {nth} = {checked[nth]} is more than {count} = {checked[count]}")
    return Constraint(function, checked, judged)


@lru_cache
def _arguments_model(function: Callable[..., bool]) -> type[BaseModel]:
    """Checks the function's arguments after the text, by their annotations or names; none may be missing or unknown."""
    _, *given = inspect.signature(function).parameters.values()
    types = {each.name: each.annotation for each in given}
    fields = {name: (ARGUMENTS[name] if own is inspect.Parameter.empty else own, ...) for name, own in types.items()}
    return create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)  # type: ignore[call-overload]


@gold_answer("what follows all instructions of a row is not in the row")
@checks_answer(constraints)
@declare_range(0.0, 1.0)
@judges_answer
def ifeval(
    prompt: Prompt,
    rollout: Rollout,
    *,
    all_or_nothing: Annotated[bool, Field(description="1 if every instruction is followed, else 0")] = False,
) -> float:
    """0 … 1."""
    followed = [constraint.is_followed(rollout.text) for constraint in constraints(prompt)]
    return float(all(followed)) if all_or_nothing else sum(followed) / len(followed)
