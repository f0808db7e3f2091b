"""Records as bytes between the ranks of a run: JSON and raw tensors, nothing that could be executed."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from safetensors.torch import load, save

from podium.records import Answer, Batch, Request, Sampling


def batches_to_bytes(batches: Sequence[Batch]) -> bytes:
    """Tensors by place and field; all other fields beside them."""
    tensors: dict[str, torch.Tensor] = {}
    plain: list[dict[str, Any]] = []
    for place, batch in enumerate(batches):
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        tensors |= {f"{place}.{name}": v.contiguous() for name, v in values.items() if isinstance(v, torch.Tensor)}
        plain.append({name: v for name, v in values.items() if not isinstance(v, torch.Tensor)})
    return _framed(json.dumps(plain).encode(), save(tensors))


def batches_from_bytes(content: bytes) -> list[Batch]:
    head, body = _parts(content)
    tensors = load(body)
    made = []
    for place, plain in enumerate(json.loads(head)):
        prefix = f"{place}."
        own: Any = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
        made.append(Batch(**tuples, **own))
    return made


def tensors_to_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


tensors_from_bytes = load


def requests_to_bytes(requests: Sequence[Request], sampling: Sampling) -> bytes:
    return json.dumps([[asdict(request) for request in requests], asdict(sampling)]).encode()


def requests_from_bytes(content: bytes) -> tuple[list[Request], Sampling]:
    requests, sampling = json.loads(content)
    made = [Request(each["key"], tuple(each["token_ids"]), tuple(each["seeds"])) for each in requests]
    return made, Sampling(**{**sampling, "stop_ids": tuple(sampling["stop_ids"])})


def answers_to_bytes(answers: Sequence[Answer]) -> bytes:
    return json.dumps([{**asdict(answer), "digests": None} for answer in answers]).encode()


def answers_from_bytes(content: bytes) -> list[Answer]:
    return [
        Answer(
            each["key"],
            tuple(map(tuple, each["token_ids"])),
            tuple(map(tuple, each["logprobs"])),
            tuple(each["finish_reasons"]),
            tuple((first, last) for first, last in each["policy_versions"]),
        )
        for each in json.loads(content)
    ]


def _framed(head: bytes, body: bytes) -> bytes:
    return len(head).to_bytes(8, "little") + head + body


def _parts(content: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end], content[end:]
