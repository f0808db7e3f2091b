"""Schemas of functions, and the call formats of model families."""

from typing import Literal

import pytest

from podium.environment.episode.calls import FORMATS, Call, checked_arguments, format_of, instructions, schema_of
from podium.errors import InputError
from tests.environment.games import add


def test_a_schema_has_the_arguments_their_types_and_the_first_paragraph() -> None:
    assert schema_of("add", add, add.__doc__) == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 1}},
                "required": ["a"],
            },
        },
    }


def test_options_are_no_arguments_and_types_are_described() -> None:
    def find(text: str, tags: list[str], mode: Literal["a", "b"] = "a", *, limit: int = 3) -> str:
        return ""

    described = schema_of("find", find)["function"]["parameters"]["properties"]
    assert set(described) == {"text", "tags", "mode"}
    assert described["tags"] == {"type": "array", "items": {"type": "string"}}
    assert described["mode"]["enum"] == ["a", "b"]


def test_arguments_are_converted_to_their_types() -> None:
    assert checked_arguments("add", add, {"a": "3"}) == {"a": 3}
    assert checked_arguments("add", add, {"a": 3.0, "b": 2}) == {"a": 3, "b": 2}
    for given in ({}, {"a": "x"}, {"a": 1, "c": 2}, {"a": None}):
        with pytest.raises(ValueError, match="argument"):
            checked_arguments("add", add, given)


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("hermes", 'So.<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [Call("add", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [Call("add", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "x"}</tool_call><tool_call>{"name": "y"}', [Call("x", {}), Call("y", {})]),
        ("hermes", "no call", []),
        ("llama3", '{"name": "add", "parameters": {"a": 1}}', [Call("add", {"a": 1})]),
        ("llama3", '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', [Call("add", {})]),
        ("llama3", '{"name": "a", "parameters": {"q": "x; y"}}', [Call("a", {"q": "x; y"})]),
        ("llama3", '{"name": "a"}; {"name": "b"}', [Call("a", {}), Call("b", {})]),
        ("llama3", '{"answer": 42}', []),
        ("llama3", 'It is {"name": "add"}', []),
        ("plain", "<call>add(1, b=2)</call>", [Call("add", {"0": 1, "b": 2})]),
        ("plain", "<call>calculator(3 * 4)</call>", [Call("calculator", {"0": "3 * 4"})]),
        ("plain", "<call>add((1, 2), b={3})</call>", [Call("add", {"0": [1, 2], "b": "{3}"})]),
        ("plain", "<call>add()</call> <call>add(1)", [Call("add", {}), Call("add", {"0": 1})]),
        ("plain", "<call></call", []),
    ],
)
def test_calls_are_found_and_read(family: str, text: str, calls: list[Call]) -> None:
    found = FORMATS[family].calls(text)
    if text == "<call></call":
        assert [bool(each.fault) for each in found] == [True]
    else:
        assert found == calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{</tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "x"}</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
def test_what_cannot_be_read_is_a_call_with_a_fault(text: str) -> None:
    [call] = FORMATS["hermes"].calls(text)
    assert call.fault.startswith("the call cannot be read")


@pytest.mark.parametrize("text", ["add(", "1 + 1", "a.b()", "(" * 5000, "add(" + "-" * 50_000 + "1)", "\0"])
def test_a_plain_call_that_cannot_be_read_has_a_fault(text: str) -> None:
    [call] = FORMATS["plain"].calls(f"<call>{text}</call>")
    assert call.fault.startswith("the call cannot be read")


def test_the_format_follows_from_the_chat_template() -> None:
    found = [
        (made.name, made.in_template)
        for made in map(
            format_of, ("{% if tools %}<tool_call>{% endif %}", "{{ tools }}<|python_tag|>", None, "{# <call> #}")
        )
    ]
    assert found == [("hermes", True), ("llama3", True), ("plain", False), ("plain", True)]


def test_a_template_that_never_mentions_tools_does_not_describe_them() -> None:
    assert not format_of("<tool_call> is a token").in_template
    assert not format_of("{{ messages }}", "hermes").in_template
    assert not format_of("{% if tools %}<tool_call>{% endif %}", "plain").in_template
    assert format_of("{% if tools %}<tool_call>{% endif %}", "hermes").in_template


@pytest.mark.parametrize("mark", ["<function=", "<arg_key>"])
def test_a_format_that_is_not_known_is_refused_unless_one_is_chosen(mark: str) -> None:
    with pytest.raises(InputError, match="in a format that Podium does not know"):
        format_of("{% if tools %}<tool_call>" + mark)
    assert format_of("{% if tools %}<tool_call>" + mark, "plain").name == "plain"


@pytest.mark.parametrize("family", FORMATS)
def test_a_model_whose_template_knows_no_tools_is_told_about_them(family: str) -> None:
    told = instructions(FORMATS[family], [schema_of("add", add, add.__doc__)])
    assert {"hermes": "<tool_call>", "llama3": '"parameters"', "plain": "<call>name(argument = value)</call>"}[
        family
    ] in told
    assert "add(a: integer, b: integer): Adds two whole numbers." in told
