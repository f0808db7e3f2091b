"""Any record as bytes or as JSON, and back. Nothing that arrives is ever executed.

The fields of a dataclass say how it travels, so a new field is one edit. `encode` and `decode` use MessagePack: numbers
in binary, tensors as type, shape and raw bytes. `to_json` and `from_json` follow the same rules as text. What arrives
is validated against the declared types; anything else is a `CodecError` that names the field.

Every field travels, computed ones too: the digest of an answer is the one that its engine took. A missing or unknown
field is refused, since both ends run the same Podium. `Any` stands for plain data: what JSON gives back unchanged. NaN
and infinities travel, since later checks report them, unless the field is `Finite`. A class with `to_dict` and
`from_dict` travels as the dict of these.
"""

import base64
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from podium.errors import CodecError, InputError, PodiumError
from podium.records import FINITE

T = TypeVar("T")
Convert = Callable[[Any], Any]
PIECE_BYTES = 1 << 30
"""Longest run of raw bytes in a message. MessagePack allows 4 GiB, and a tensor may have more."""
AS_JSON = b"\xc1"
"""First byte of a message whose rest is JSON. MessagePack never uses this byte and has neither lone surrogates nor
integers beyond 64 bits."""
DTYPES = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DTYPES += ("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")


def encode(value: Any, kind: Any = None) -> bytes:
    """`kind` is the type that the receiver decodes; by default that of the value. An `InputError` where it holds what
    cannot travel."""
    kind = type(value) if kind is None else kind
    try:
        return _ENCODER.encode(to_plain(value, kind))
    except (UnicodeEncodeError, OverflowError):
        return AS_JSON + to_json(value, kind).encode()
    except RecursionError:
        raise InputError(f"{_name(kind)}: nested too deeply to be sent") from None


def decode(kind: type[T] | Any, content: Any) -> T:
    """`content` is bytes or any other buffer. Views in the record refer to it; tensors are copies."""
    view = memoryview(content)
    if view[:1] == AS_JSON:
        return from_json(kind, bytes(view[1:]))
    with _errors_named(kind):
        return _unpacked(_decoder(kind).decode(view), kind)


def to_json(value: Any, kind: Any = None) -> str:
    try:
        return json.dumps(to_plain(value, kind), default=_plain_container)
    except RecursionError:
        raise InputError(f"{_name(kind or type(value))}: nested too deeply to be sent") from None


def from_json(kind: type[T] | Any, text: str | bytes) -> T:
    with _errors_named(kind):
        return from_plain(kind, json.loads(text))


def to_plain(value: Any, kind: Any = None) -> Any:
    """What `to_json` writes, for a larger text that others put together; the bytes of tensors are still views."""
    pack = _form(type(value) if kind is None else kind).pack
    try:
        return value if pack is None else pack(value)
    except _Refused as refused:
        raise InputError(str(refused)) from None


def from_plain(kind: type[T] | Any, plain: Any) -> T:
    with _errors_named(kind):
        return _unpacked(msgspec.convert(plain, _form(kind).wire), kind)


@dataclass(frozen=True)
class _Form:
    """How values of one type travel."""

    wire: Any
    """The type that msgspec validates."""
    pack: Convert | None = None
    """From a value to what is written; None: as it is."""
    unpack: Convert | None = None
    """From the validated `wire` to a value; None: as it is."""


class _Refused(Exception):
    """A value that cannot travel or must not arrive, with the path of its field. The path begins at the innermost
    record that has a label, such as a prompt."""

    label = ""

    def __init__(self, reason: str) -> None:
        self.reason, self.path = reason, ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.label, self.path.lstrip("."), self.reason) if part)


_SHAPE = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
_TENSOR = msgspec.defstruct(
    "Tensor",
    [("dtype", Literal[DTYPES]), ("shape", _SHAPE), ("data", tuple[memoryview, ...])],
    forbid_unknown_fields=True,
)
"""In JSON the data is base64."""


class _Torch:
    """Stands for torch in the annotations of records, which do not import it."""

    class Tensor: ...


@contextmanager
def _errors_named(kind: Any) -> Iterator[None]:
    """Whatever is wrong with a message is a `CodecError` with the name of the record."""
    try:
        yield
    except PodiumError:
        raise  # such as settings that are refused
    except RecursionError:
        raise CodecError(f"{_name(kind)}: nested too deeply") from None
    except (_Refused, msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
        raise CodecError(f"{_name(kind)}: {error}") from None


def _unpacked(wire: Any, kind: Any) -> Any:
    unpack = _form(kind).unpack
    return wire if unpack is None else unpack(wire)


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(_form(kind).wire)


def _plain_container(value: Any) -> Any:
    """What msgspec and json do not write by themselves: mappings other than dict, and subclasses of numbers; for json
    also bytes."""
    if isinstance(value, memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    for plain in (float, int, str):
        if isinstance(value, plain):
            return plain(value)
    raise InputError(f"{value!r:.80} of type {type(value).__name__} cannot be sent to another process")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain_container)


@cache
def _form(kind: Any) -> _Form:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _Form(float, None, _finite) if FINITE in arguments[1:] else _form(arguments[0])
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if kind is Any:
        return _Form(Any, _plain)
    if origin in (tuple, list, Sequence):
        return _sequence(origin, arguments)
    if origin in (dict, Mapping):
        return _mapping(*arguments)
    if kind is _Torch.Tensor or (kind.__module__, getattr(kind, "__name__", "")) == ("torch", "Tensor"):
        return _Form(_TENSOR, _raw, _from_raw)
    if hasattr(kind, "from_dict"):
        return _Form(dict[str, Any], lambda value: _plain(value.to_dict()), kind.from_dict)
    return _record(kind) if is_dataclass(kind) else _Form(kind)


def _record(kind: Any) -> _Form:
    hints = typing.get_type_hints(kind, localns={"torch": _Torch}, include_extras=True)
    forms = {field.name: _form(hints[field.name]) for field in fields(kind)}
    struct = msgspec.defstruct(
        kind.__name__, [(name, form.wire) for name, form in forms.items()], forbid_unknown_fields=True
    )
    packs = [(name, form.pack) for name, form in forms.items() if form.pack is not None]
    unpacks = [(name, form.unpack) for name, form in forms.items() if form.unpack is not None]
    names = tuple(forms)

    def pack(record: Any) -> dict[str, Any]:
        written = {name: getattr(record, name) for name in names}
        try:
            return written | {name: _at(f".{name}", convert, written[name]) for name, convert in packs}
        except _Refused as refused:
            refused.label = refused.label or getattr(record, "label", "")
            raise

    def unpack(wire: Any) -> Any:
        values = {name: getattr(wire, name) for name in names}
        record = object.__new__(kind)
        vars(record).update(values | {name: _at(f".{name}", convert, values[name]) for name, convert in unpacks})
        return record

    return _Form(struct, pack, unpack)


def _at(step: str, convert: Convert, value: Any) -> Any:
    """The value, converted; a refusal says where it stands in the record."""
    try:
        return convert(value)
    except _Refused as refused:
        if not refused.label:
            refused.path = step + refused.path
        raise


def _each(convert: Convert, values: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
    """Values with their places in a sequence or mapping, converted."""
    return (_at(f"[{place!r}]", convert, value) for place, value in values)


def _sequence(origin: Any, arguments: tuple[Any, ...]) -> _Form:
    """A `Sequence` arrives as a tuple, as records have them."""
    made = list if origin is list else tuple
    if origin is tuple and arguments[-1:] != (...,):
        return _fixed_tuple([_form(each) for each in arguments])
    item = _form(arguments[0])
    wire = list[item.wire] if made is list else tuple[item.wire, ...]
    if item.pack is None and item.unpack is None:
        return _Form(wire)

    def of_each(convert: Convert | None) -> Convert:
        return made if convert is None else lambda values: made(_each(convert, enumerate(values)))

    return _Form(wire, of_each(item.pack), of_each(item.unpack))


def _fixed_tuple(items: list[_Form]) -> _Form:
    wire = tuple[tuple(item.wire for item in items)]  # type: ignore[misc]
    if all(item.pack is None and item.unpack is None for item in items):
        return _Form(wire)

    def together(converts: list[Convert | None]) -> Convert:
        return lambda values: tuple(
            value if convert is None else convert(value) for value, convert in zip(values, converts, strict=True)
        )

    return _Form(wire, together([item.pack for item in items]), together([item.unpack for item in items]))


def _mapping(key: Any, value: Any) -> _Form:
    """JSON has no keys but texts, so any others travel in pairs with their values."""
    if value is Any:
        return _Form(dict[key, Any], lambda given: _plain(dict(given)))
    if key is not str:
        pairs = _form(tuple[tuple[key, value], ...])
        pack, unpack = pairs.pack or tuple, pairs.unpack or tuple
        return _Form(pairs.wire, lambda given: pack(given.items()), lambda wire: dict(unpack(wire)))
    item = _form(value)

    def of_values(convert: Convert | None) -> Convert | None:
        return convert and (lambda given: dict(zip(given, _each(convert, given.items()), strict=True)))

    return _Form(dict[str, item.wire], of_values(item.pack), of_values(item.unpack))


def _union(members: tuple[Any, ...]) -> _Form:
    """Values of one member at most are converted; the others are numbers, texts or None."""
    forms = [_form(member) for member in members]
    wire = Union[tuple(form.wire for form in forms)]  # type: ignore[misc]  # noqa: UP007
    changing = [form for form in forms if form.pack is not None or form.unpack is not None]
    if not changing:
        return _Form(wire)
    [form] = changing
    native = tuple(type(None) if each.wire is None else each.wire for each in forms if each is not form)

    def kept(convert: Convert | None) -> Convert | None:
        return convert and (lambda value: value if isinstance(value, native) else convert(value))

    return _Form(wire, kept(form.pack), kept(form.unpack))


def _plain(value: Any) -> Any:
    """The value, if JSON gives it back unchanged."""
    if value is None or type(value) in (str, bool, int):
        return value
    try:
        is_plain = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        is_plain = False
    if not is_plain:
        raise _Refused(
            f"{value!r:.80} is not plain data, and nothing else is sent to another process: use numbers, texts, lists "
            "and tables with texts as keys"
        )
    return value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise _Refused(f"{value} is not a finite number")
    return value


def _raw(tensor: Any) -> dict[str, Any]:
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise _Refused(f"a tensor is needed, not {type(tensor).__name__}")
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    pieces = [flat[start : start + PIECE_BYTES] for start in range(0, len(flat), PIECE_BYTES)]
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "data": pieces}


def _from_raw(raw: Any) -> Any:
    import torch

    dtype = getattr(torch, raw.dtype)
    size, expected = sum(len(piece) for piece in raw.data), math.prod(raw.shape) * dtype.itemsize
    if size != expected:
        raise _Refused(f"{size} bytes for a tensor {list(raw.shape)} of {raw.dtype}, which has {expected}")
    if not size:
        return torch.empty(raw.shape, dtype=dtype)
    return torch.frombuffer(bytearray().join(raw.data), dtype=dtype).view(raw.shape)


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("podium.records.", "")
