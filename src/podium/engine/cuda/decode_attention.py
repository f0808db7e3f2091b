"""Attention of a decode step over slots, registered with transformers under the name "podium_decode".

In: one query, key and value a row of the batch, and where the row's other keys are: a prompt's, which all rollouts of a
group share, and those of the row's own slot, which the new one joins. Out: attention over just these, up to their
lengths. On CUDA by a kernel that reads nothing else; the plain form is for devices without Triton.

The cache lies on the attention modules themselves, as buffers `slot_keys`, `slot_values` `[slots, columns, heads,
head_dim]` and `prompt_keys`, `prompt_values` `[prompts, columns, heads, head_dim]`: so compiled layers share one piece
of code, since nothing in it depends on a layer's number.
"""

from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from podium.model.attention import window_of

NAME = "podium_decode"
CACHES = ("slot_keys", "slot_values", "prompt_keys", "prompt_values")


@dataclass(frozen=True)
class DecodeRows:
    """Where the keys of each row of the batch are; every tensor is int64 `[rows]`."""

    slots: torch.Tensor
    lengths: torch.Tensor
    """Columns of the slot in use before this step; its key goes to the next one."""
    prompts: torch.Tensor
    prompt_lengths: torch.Tensor


def slot_attention(module, query, key, value, attention_mask, decode: DecodeRows, scaling: float, **kwargs):
    """transformers' attention interface: returns `[rows, 1, heads, head_dim]` and no weights."""
    dtype = module.slot_keys.dtype
    own = (tensor[:, :, 0].to(dtype) for tensor in (query, key, value))
    caches = [getattr(module, name) for name in CACHES]
    where = (decode.slots, decode.lengths, decode.prompts, decode.prompt_lengths)
    window = window_of(module, kwargs) or 0
    return decode_attention(*own, *caches, *where, scaling, window)[:, None], None


@torch.library.custom_op("podium::decode_attention", mutates_args=("slot_keys", "slot_values"))
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slot_keys: torch.Tensor,
    slot_values: torch.Tensor,
    prompt_keys: torch.Tensor,
    prompt_values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    prompts: torch.Tensor,
    prompt_lengths: torch.Tensor,
    scaling: float,
    window: int,
) -> torch.Tensor:
    """`[rows, heads, head_dim]` for a query of that shape; `window` 0 looks at everything.

    `key` and `value` `[rows, key heads, head_dim]` go to the slots' next columns.
    """
    slot_keys[slots, lengths], slot_values[slots, lengths] = key, value
    columns = torch.arange(prompt_keys.shape[1] + slot_keys.shape[1], device=query.device)
    own = columns - prompt_keys.shape[1]
    newest = prompt_lengths + lengths  # position of the query
    is_prompt, is_own = columns < prompt_lengths[:, None], (own >= 0) & (own <= lengths[:, None])
    positions = torch.where(own < 0, columns, own + prompt_lengths[:, None])
    allowed = (is_prompt & (own < 0)) | is_own
    if window:
        allowed &= positions > newest[:, None] - window
    keys = torch.cat([prompt_keys[prompts], slot_keys[slots]], 1).transpose(1, 2)
    values = torch.cat([prompt_values[prompts], slot_values[slots]], 1).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], keys, values, allowed[:, None, None], scale=scaling, enable_gqa=True
    )[:, :, 0].contiguous()


@decode_attention.register_kernel("cuda")
def _on_cuda(*args) -> torch.Tensor:
    from podium.engine.cuda.flash_decode import flash_decode  # needs Triton

    return flash_decode(*args)


@decode_attention.register_fake
def _shape_of_result(query, *others) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


AttentionInterface.register(NAME, slot_attention)
