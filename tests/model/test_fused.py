import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from podium.model.fused import attention_flops, register_cost_of_attention


def test_attention_is_counted_by_its_queries_and_the_longest_key() -> None:
    """3 tokens, 2 heads of 4, 5 keys at most: 2 products of 3 · 2 · 4 · 5 pairs, 2 operations each."""
    register_cost_of_attention()
    attention = torch.ops.torch_attn._varlen_attn
    assert flop_registry[attention]
    named = [argument.name for argument in attention.default._schema.arguments]
    assert named[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    shape, starts = (3, 2, 4), (2,)
    assert attention_flops(shape, shape, shape, starts, starts, 3, 5, out_val=None) == 480
    with FlopCounterMode(display=False) as counted, torch.device("meta"):
        tokens, ends = torch.empty(shape, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int32)
        attention(tokens, tokens, tokens, ends, ends, 3, 5)
    assert counted.get_total_flops() == 480
