"""Attention of a decode step over pages, registered with transformers under the name "podium_decode".

In: one query, key and value a row of the batch, and where the row's other keys are: those of its prompt, whose pages
all rollouts of a group share, then its own, which the new one joins. Out: attention over just these, up to their
lengths. On CUDA by a kernel that reads nothing else; the plain form is for devices without Triton.

The pages lie on the attention modules themselves, as buffers `paged_keys`, `paged_values` `[pages, PAGE, heads,
head_dim]`: so compiled layers share one piece of code, since nothing in it depends on a layer's number.
"""

from dataclasses import dataclass

import torch
from transformers import AttentionInterface

from podium.engine.cuda.roster import PAGE
from podium.model.attention import window_of

NAME = "podium_decode"
CACHES = ("paged_keys", "paged_values")


@dataclass(frozen=True)
class DecodeRows:
    """Where the keys of each row of the batch are."""

    tables: torch.Tensor
    """int32 `[slots, pages of a request]`: the pages of each slot's prompt, then those of its own tokens, which begin
    on a page of their own."""
    slots: torch.Tensor
    """int64 `[rows]`"""
    lengths: torch.Tensor
    """int64 `[rows]`, own tokens with keys before this step; the new key goes to the next column."""
    prompt_lengths: torch.Tensor
    """int64 `[rows]`"""


def slot_attention(module, query, key, value, attention_mask, decode: DecodeRows, scaling: float, **kwargs):
    """transformers' attention interface: returns `[rows, 1, heads, head_dim]` and no weights."""
    dtype = module.paged_keys.dtype
    own = (tensor[:, :, 0].to(dtype) for tensor in (query, key, value))
    where = (decode.tables, decode.slots, decode.lengths, decode.prompt_lengths)
    window = window_of(module, kwargs) or 0
    return decode_attention(*own, module.paged_keys, module.paged_values, *where, scaling, window)[:, None], None


@torch.library.custom_op("podium::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    prompt_lengths: torch.Tensor,
    scaling: float,
    window: int,
) -> torch.Tensor:
    """`[rows, heads, head_dim]` for a query of that shape; `window` 0 looks at everything.

    `key` and `value` `[rows, key heads, head_dim]` go to the rows' next columns in the pages `keys` and `values`.
    """
    pages = tables[slots].long()
    first_own = (prompt_lengths + PAGE - 1) // PAGE  # number of the first page that is not the prompt's
    new_page = pages.gather(1, (first_own + lengths // PAGE)[:, None])[:, 0]
    keys[new_page, lengths % PAGE], values[new_page, lengths % PAGE] = key, value
    columns = torch.arange(pages.shape[1] * PAGE, device=query.device)
    own = columns - PAGE * first_own[:, None]
    newest = prompt_lengths + lengths  # position of the query
    positions = torch.where(own < 0, columns, own + prompt_lengths[:, None])
    allowed = (columns < prompt_lengths[:, None]) | ((own >= 0) & (own <= lengths[:, None]))
    if window:
        allowed &= positions > newest[:, None] - window
    keys_of_rows, values_of_rows = (pool[pages].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], keys_of_rows, values_of_rows, allowed[:, None, None], scale=scaling, enable_gqa=True
    )[:, :, 0].contiguous()


@decode_attention.register_kernel("cuda")
def _on_cuda(*args) -> torch.Tensor:
    from podium.engine.cuda.kernels import flash_decode  # needs Triton

    return flash_decode(*args)


@decode_attention.register_fake
def _shape_of_result(query, *others) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


AttentionInterface.register(NAME, slot_attention)
