"""What tells two tokenizers, or the weights of two processes, apart."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch


def tokenizer_fingerprint(tokenizer: Any) -> dict[str, Any]:
    """Hashes of the vocabulary and of the chat template, and the special tokens with their ids."""
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    roles = {name: getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad", "unk")}
    return {
        "vocabulary": _hash(sorted(tokenizer.get_vocab().items())),
        "special_ids": {**special, **roles},
        "chat_template": _hash(tokenizer.chat_template),
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


@torch.no_grad()
def weights_digest(weights: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """sha256 over names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in weights:
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.digest()
