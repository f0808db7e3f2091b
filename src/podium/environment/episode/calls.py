"""How a policy calls tools: the JSON schema of a Python function, and the call formats of model families.

The format follows from the chat template, which was made for the format that the model learnt. A model whose template
knows no tools gets their descriptions in its system message, and writes `<call>name(argument = value)</call>`. A
template that mentions `<call>` is of a model that learnt this format.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ConfigDict, ValidationError, create_model

from podium.errors import InputError
from podium.settings.contracts import signature_of

HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
PLAIN = re.compile(r"<call>(.*?)(?:</call>|$)", re.DOTALL)
LLAMA = re.compile(r'\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"(?:name|type)")', re.DOTALL)
OTHER_FORMATS = ("<function=", "<arg_key>")
"""Calls of templates whose format is not known here."""
MAX_CALLS = 32
"""Calls in one turn that are executed; more are answered with an error."""


@dataclass(frozen=True)
class Call:
    """One call as the policy wrote it."""

    name: str
    arguments: Mapping[str, Any]
    fault: str = ""
    """Why it cannot be executed; the policy reads this as the result."""


def schema_of(name: str, function: Callable[..., Any], doc: str | None = None) -> dict[str, Any]:
    """OpenAI's description of a function: its positional arguments and the first paragraph of its docstring."""
    described = _arguments_model(name, function).model_json_schema()
    parameters = {"type": "object", "properties": described.get("properties", {})}
    for each in parameters["properties"].values():
        each.pop("title", None)
    if required := described.get("required"):
        parameters["required"] = required
    if shared := described.get("$defs"):
        parameters["$defs"] = shared
    text = " ".join((doc or name).partition("\n\n")[0].split())
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


def checked_arguments(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments converted to the types of the signature; `ValueError` says what is wrong with them."""
    try:
        made = _arguments_model(name, function).model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"argument {where}: {first['msg']}") from None
    return {key: getattr(made, key) for key in type(made).model_fields if key in made.model_fields_set}


def _arguments_model(name: str, function: Callable[..., Any]) -> Any:
    parameters = [
        each
        for each in signature_of(f"tool {name!r}", function).parameters.values()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.POSITIONAL_ONLY)
    ]
    fields: dict[str, Any] = {
        each.name: (
            str if each.annotation is each.empty else each.annotation,
            ... if each.default is each.empty else each.default,
        )
        for each in parameters
    }
    return create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=True), **fields)


# ---- formats


@dataclass(frozen=True)
class CallFormat:
    """How calls are written in a turn."""

    name: str
    find: Callable[[str], list[str]]
    """The calls in a turn, each as its text."""
    read: Callable[[str], Call]
    in_template: bool = False
    """Whether the chat template describes the tools; otherwise the system message does."""

    def calls(self, text: str) -> list[Call]:
        """What cannot be read is a call with a fault."""
        found = []
        for each in self.find(text):
            try:
                with warnings.catch_warnings(action="ignore"):  # Python's own, about what the policy wrote
                    found.append(self.read(each))
            except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
                found.append(Call("", {}, f"the call cannot be read: {str(error)[:200]}"))
        return found


def _json_call(text: str) -> Call:
    given = json.loads(text)
    if not isinstance(given, dict) or not isinstance(given.get("name"), str):
        raise ValueError('it must be a JSON object with "name" and "arguments"')
    arguments = given.get("arguments", given.get("parameters", {}))
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError("the arguments must be a JSON object")
    return Call(given["name"], arguments)


def _plain_call(text: str) -> Call:
    """`name(a = 1, b = "x")`: a value is a Python literal, or else its text, such as 3 * 4. Nothing is executed. Values
    without a name are kept under their position."""
    made = ast.parse(text.strip(), mode="eval").body
    if not isinstance(made, ast.Call) or not isinstance(made.func, ast.Name):
        raise ValueError("write name(argument = value)")
    named = {each.arg: _literal(each.value) for each in made.keywords if each.arg is not None}
    return Call(made.func.id, {str(place): _literal(each) for place, each in enumerate(made.args)} | named)


def _literal(node: ast.expr) -> Any:
    """A value that JSON has; anything else is its text."""
    try:
        value = ast.literal_eval(node)
        return json.loads(json.dumps(value))
    except (ValueError, TypeError):
        return ast.unparse(node)


def _llama_calls(text: str) -> list[str]:
    """A turn that is nothing but calls, separated by semicolons."""
    start = LLAMA.match(text)
    if start is None:
        return []
    found, place, decoder = [], start.end(), json.JSONDecoder()
    while place < len(text):
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return [*found, text[place:]]
        found.append(text[place:end])
        place = end + len(text[end:]) - len(text[end:].lstrip(" ;\n"))
    return found


FORMATS = {
    made.name: made
    for made in (
        CallFormat("hermes", HERMES.findall, _json_call),
        CallFormat("llama3", _llama_calls, _json_call),
        CallFormat("plain", PLAIN.findall, _plain_call),
    )
}


def format_of(chat_template: str | None, chosen: str | None = None) -> CallFormat:
    """The format that a chat template was made for, or the chosen one. A template that never mentions tools does not
    describe them, so the system message does."""
    template = chat_template or ""
    if chosen is None and any(mark in template for mark in OTHER_FORMATS):
        raise InputError(
            "this model's chat template describes tool calls in a format that Podium does not know; set "
            "rollout.call_format = 'hermes' or 'plain' and say in rollout.system how to call"
        )
    if "<call>" in template:
        name = "plain"
    elif "<tool_call>" in template:
        name = "hermes"
    elif "<|python_tag|>" in template or ("ipython" in template and "tools" in template):
        name = "llama3"
    else:
        name = "plain"
    describes = "tools" in template or "<call>" in template
    return replace(FORMATS[chosen or name], in_template=describes and chosen in (None, name))


EXAMPLES = {
    "hermes": '<tool_call>{"name": NAME, "arguments": {ARGUMENT: VALUE}}</tool_call>',
    "llama3": '{"name": NAME, "parameters": {ARGUMENT: VALUE}}',
    "plain": "<call>name(argument = value)</call>",
}


def instructions(call_format: CallFormat, schemas: Sequence[Mapping[str, Any]]) -> str:
    """The tool descriptions for the system message, for a chat template that does not describe tools."""
    example = EXAMPLES[call_format.name]
    lines = [f"You can call these tools. Write {example}, end your turn, and read the result."]
    for schema in schemas:
        function = schema["function"]
        arguments = ", ".join(
            f"{name}: {each.get('type', 'any')}" for name, each in function["parameters"]["properties"].items()
        )
        lines.append(f"{function['name']}({arguments}): {function['description']}")
    return "\n".join(lines)
