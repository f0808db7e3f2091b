"""What tells two tokenizers apart."""

import hashlib
import json
from typing import Any


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
