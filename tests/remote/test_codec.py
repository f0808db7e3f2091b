"""Every record goes through the codec and comes out as it went in; whatever else arrives is one kind of error."""

import inspect
import json
import math
import subprocess
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import podium.records
from podium.errors import CodecError, InputError
from podium.records import FINITE, Answer, Batch, EngineTraits, Group, Prompt, Request, Sampling, UpdateResult
from podium.remote import codec
from podium.remote.codec import decode, encode, from_json, to_json
from tests.builders import make_group, make_prompt, make_rollout

RECORDS = [
    thing
    for _, thing in inspect.getmembers(podium.records, is_dataclass)
    if isinstance(thing, type) and thing.__module__ == "podium.records" and thing is not EngineTraits  # stays at home
]
TENSORS = dict[str, torch.Tensor]
FEW = settings(max_examples=25, deadline=None)

texts = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too
integers = st.integers(-(1 << 63), (1 << 64) - 1) | st.sampled_from([0, 1, -1, (1 << 63) - 1, -(1 << 63)])
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8]))
    return torch.randint(0, 2, shape).to(dtype)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, by its own declaration."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return st.floats(allow_nan=False, allow_infinity=False) if FINITE in arguments else values_of(arguments[0])
    if origin in (Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (tuple, Sequence):
        if arguments[-1] is ... or origin is Sequence:
            return st.lists(values_of(arguments[0]), max_size=4).map(tuple)
        return st.tuples(*map(values_of, arguments))
    if origin is Mapping:
        return st.dictionaries(*map(values_of, arguments), max_size=3)
    if is_dataclass(kind):
        return records_of(kind)
    scalars = {int: integers, float: st.floats(), str: texts, bool: st.booleans(), type(None): st.none()}
    return {**scalars, Any: plain, torch.Tensor: tensors()}[kind]


def records_of(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, localns={"torch": torch}, include_extras=True)
    given_fields = {each.name: values_of(hints[each.name]) for each in fields(kind) if each.init}
    if kind is Answer:  # its digest is of ids, which have 64 bits
        given_fields["token_ids"] = st.lists(st.integers(0, (1 << 63) - 1)).map(tuple)
    return st.builds(kind, **given_fields)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value; NaN is equal to NaN here."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if is_dataclass(one):
        return type(one) is type(other) and all(
            same(getattr(one, each.name), getattr(other, each.name)) for each in fields(one)
        )
    if isinstance(one, Mapping):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return isinstance(other, float) and (one == other or (math.isnan(one) and math.isnan(other)))
    return type(one) is type(other) and one == other


def test_there_are_records() -> None:
    assert {Answer, Batch, Group, Prompt, Request, UpdateResult} <= set(RECORDS)
    assert len(RECORDS) >= 18


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_every_record_arrives_as_it_was_sent(kind: type, data: st.DataObject) -> None:
    record = data.draw(records_of(kind))
    assert same(record, decode(kind, encode(record)))
    assert same(record, from_json(kind, to_json(record)))


@FEW
@given(data=st.data())
def test_containers_of_records_arrive_as_they_were_sent(data: st.DataObject) -> None:
    kind = tuple[list[Request], Sampling]
    sent = (data.draw(st.lists(records_of(Request))), data.draw(records_of(Sampling)))
    assert decode(kind, encode(sent, kind)) == sent
    named = data.draw(st.dictionaries(texts, tensors()))
    assert same(named, decode(TENSORS, encode(named, TENSORS)))


def test_numbers_and_tensors_travel_in_binary() -> None:
    request = Request(tuple(range(10_000, 20_000)), Sampling(), 1)
    assert len(encode(request)) < 3 * 10_000 + 200  # a text of them has 6 characters each
    tensor = torch.arange(1000, dtype=torch.float64)
    assert bytes(tensor.numpy().data) in encode({"x": tensor}, TENSORS)


def test_a_tensor_of_several_pieces_arrives_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "PIECE_BYTES", 100)
    tensor = torch.arange(99).reshape(9, 11).t()
    assert torch.equal(decode(torch.Tensor, encode(tensor, torch.Tensor)), tensor)


def test_the_digest_of_an_answer_is_the_one_that_its_engine_took() -> None:
    answer = Answer((1, 2), (-1.0, -2.0), "stop", (0, 0))
    object.__setattr__(answer, "digest", "of other ids")
    assert decode(Answer, encode(answer)).digest == "of other ids"


def test_a_tensor_that_arrives_can_be_changed_without_changing_the_message() -> None:
    content = encode({"x": torch.zeros(3)}, TENSORS)
    decode(TENSORS, content)["x"] += 1
    assert torch.equal(decode(TENSORS, content)["x"], torch.zeros(3))


@dataclass(frozen=True)
class Old:
    a: int
    b: tuple[str, ...] = ()


@dataclass(frozen=True)
class New:
    a: int
    b: tuple[str, ...] = ()
    c: float = field(default=1.0)


def test_a_field_that_the_other_end_does_not_know_is_refused() -> None:
    with pytest.raises(CodecError, match=r"^Old: Object contains unknown field `c`"):
        decode(Old, encode(New(1)))
    with pytest.raises(CodecError, match=r"^New: Object missing required field `c`"):
        decode(New, encode(Old(1)))
    with pytest.raises(CodecError, match="unknown field `c`"):
        from_json(Old, to_json(New(1)))


WRONG = [
    ({"a": 1.0, "b": []}, r"Expected `int`, got `float` - at `\$\.a`"),
    ({"a": True, "b": []}, r"Expected `int`, got `bool` - at `\$\.a`"),
    ({"a": "1", "b": []}, r"Expected `int`, got `str` - at `\$\.a`"),
    ({"a": None, "b": []}, r"Expected `int`, got `(null|None)` - at `\$\.a`"),
    ({"a": 1, "b": ["x", 2]}, r"Expected `str`, got `int` - at `\$\.b\[1\]`"),
    ([1, []], "Expected `object`, got `array`"),
]


@pytest.mark.parametrize(("content", "complaint"), WRONG)
def test_a_wrong_type_is_refused_with_its_path(content: Any, complaint: str) -> None:
    with pytest.raises(CodecError, match=complaint):
        decode(Old, msgspec.msgpack.encode(content))
    with pytest.raises(CodecError, match=complaint):
        from_json(Old, json.dumps(content))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused_where_the_record_says_so(value: float) -> None:
    with pytest.raises(CodecError, match=rf"^Sampling: temperature: {value} is not a finite number"):
        decode(Sampling, encode(Sampling(temperature=value)))
    group = replace(make_group(), rewards=(1.0, value))
    with pytest.raises(CodecError, match=r"^Group: rewards\[1\]: "):
        from_json(Group, to_json(group))
    rollout = make_rollout("x", (1, 2), rollout_logprobs=(value, -1.0))  # whoever trains on it complains
    assert same(decode(type(rollout), encode(rollout)), rollout)


@pytest.mark.parametrize("value", [(1, 2), {1}, {1: 2}, math.nan, b"x", object()])
def test_what_json_would_change_is_refused_by_the_name_of_its_prompt(value: Any) -> None:
    prompt = make_prompt(5, source="arithmetic", answer=value)
    with pytest.raises(InputError, match=r"^prompt 5 \(arithmetic\): answer: .* is not plain data"):
        encode([Group(prompt, ())], list[Group])
    with pytest.raises(InputError, match=r"^prompt 5 \(data\): metadata: .* is not plain data"):
        to_json(replace(prompt, source="", answer=None, metadata={"deep": value}))


def test_data_without_an_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InputError, match="not plain data"):
        encode(make_prompt(answer=endless))


def tensor_message(**changes: Any) -> bytes:
    sound = {"dtype": "float32", "shape": [2], "data": [bytes(8)]}
    return msgspec.msgpack.encode({"x": {**sound, **changes}})


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float64"},
        {"dtype": "object"},
        {"dtype": "load"},
        {"shape": [3]},
        {"shape": [-2]},
        {"shape": [1 << 62, 1 << 62]},
        {"shape": [2.0]},
        {"data": []},
        {"data": ["text"]},
        {"more": 1},
    ],
)
def test_a_tensor_that_does_not_fit_its_own_description_is_refused(changes: Any) -> None:
    assert torch.equal(decode(TENSORS, tensor_message())["x"], torch.zeros(2))
    with pytest.raises(CodecError):
        decode(TENSORS, tensor_message(**changes))


GROUP = Group(make_prompt(1, metadata={"a": [1]}), (make_rollout("text", (1, 2)),), rewards=(1.0,))
HOSTILE = [
    b"",
    b"\x91" * 100_000,
    b"\xdd\xff\xff\xff\xff",  # an array of 4 billion, without its items
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xc1",
    codec.AS_JSON + b"[" * 100_000,
    codec.AS_JSON + b"\xff",
    codec.AS_JSON + b"9" * 100_000,
    b"\xd5\x01ab",
    b"\xa2\xff\xfe",
]


@pytest.mark.parametrize("content", HOSTILE, ids=lambda content: repr(content[:8]))
def test_hostile_bytes_are_one_kind_of_error(content: bytes) -> None:
    for kind in (Group, Batch, TENSORS, list[Answer], str):
        with pytest.raises(CodecError):
            decode(kind, content)


@pytest.mark.parametrize("record", [GROUP, replace(GROUP, prompt=make_prompt(answer="\ud800"))], ids=["binary", "json"])
def test_a_message_that_was_cut_off_is_refused(record: Group) -> None:
    content = encode(record)
    for length in range(len(content)):
        with pytest.raises(CodecError):
            decode(Group, content[:length])


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, len(encode(GROUP)) - 1), byte=st.integers(0, 255))
def test_a_damaged_message_gives_a_record_or_one_kind_of_error(place: int, byte: int) -> None:
    content = bytearray(encode(GROUP))
    content[place] = byte
    try:
        found = decode(Group, content)
    except CodecError:
        return
    assert isinstance(found, Group)
    assert isinstance(found.rollouts, tuple)


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=64))
def test_noise_is_refused(content: bytes) -> None:
    for kind in (Group, TENSORS, Sampling):
        try:
            decode(kind, content)
        except CodecError:
            continue
        assert kind is TENSORS  # the empty one is a single byte
        assert content[:1] in (b"\x80", b"\xde", b"\xdf")


def test_the_codec_loads_no_torch_until_it_meets_a_tensor() -> None:
    code = (
        "import sys, podium.remote.codec as c; from podium.records import Prompt, Group, Batch; "
        "g = Group(Prompt(1, (1, 2)), ()); assert c.decode(Group, c.encode(g)) == g; c._form(Batch); "
        "print('torch' in sys.modules, 'pickle' in vars(c))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False False"
