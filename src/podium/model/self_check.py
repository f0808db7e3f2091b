"""Whether Podium computes what the model means, asked once when it is loaded.

Some architectures scale their logits, bias their LM head or give attention more than queries, keys and values; a
trainer that does not know would be wrong in silence. So the packed forward pass is compared with the model's own, under
transformers' own attention, on a few tokens.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from podium.errors import InputError
from podium.model import attention
from podium.model.forward import head_weight, sequence_logprobs

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest difference of a logprob."""

LENGTHS = (9, 5)
"""Tokens of the two documents that are packed."""


def check_model(model: PreTrainedModel, name: str) -> None:
    """Raises `InputError` unless packed logprobs are those of the model itself, its dropout switched off for good."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # sampler and trainer must agree; the adapter may still have its own
    rows = head_weight(model).shape[0]
    documents = [[(7 * i * i + 3 * i + length) % rows for i in range(1, length + 1)] for length in LENGTHS]
    try:
        expected = [_own_logprobs(model, ids) for ids in documents]
        model.train()  # as the trainer's step does: dropout that cannot be switched off shows here
        alone = [sequence_logprobs(model, ids) for ids in documents]
        packed = sequence_logprobs(model, documents[0], documents[1])
        model.eval()
    except Exception as error:
        raise InputError(f"{_title(name)} cannot run: {type(error).__name__}: {error}") from None
    together = [*expected[0], *expected[1]]
    gap = max(abs(a - b) for a, b in zip([*alone[0], *alone[1], *packed], together * 2, strict=True))
    if not gap <= TOLERANCE[model.dtype]:
        raise InputError(
            f"{_title(name)} is not computed rightly by Podium's packed forward pass: its logprobs differ from the "
            f"model's own by {gap:.3g}; use another architecture, such as Llama, Qwen, Mistral, Gemma 3 or SmolLM"
        )


@torch.no_grad()
def _own_logprobs(model: PreTrainedModel, ids: list[int]) -> list[float]:
    """By the model's own forward pass, with transformers' plain attention."""
    model.set_attn_implementation("eager")
    try:
        logits: Any = model(torch.tensor([ids], device=head_weight(model).device), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(attention.NAME)
    every = logits.float().log_softmax(-1)
    return [float(every[t - 1, ids[t]]) for t in range(1, len(ids))]


def _title(name: str) -> str:
    return f"model.name = {name!r}"
