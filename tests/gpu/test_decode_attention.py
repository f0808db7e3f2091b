"""The kernel of decode attention gives what its plain form gives, for every form of it that a head's shape asks for."""

import pytest
import torch

from podium.engine.cuda.decode_step import decode_attention
from podium.engine.cuda.roster import PAGE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ROWS, SLOTS, WIDTH = 5, 7, 5
"""Rows of the batch, slots, and pages of a slot."""
POOLS = (3, 4)
"""Of the tensors that go in: the pages of keys and of values."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("dim", "key_heads", "group"), [(64, 3, 3), (128, 8, 2), (128, 1, 32), (256, 2, 4)])
def test_the_kernel_gives_what_the_plain_form_gives(
    dim: int, key_heads: int, group: int, dtype: torch.dtype, window: int
) -> None:
    torch.manual_seed(0)
    own, pool = (ROWS, key_heads, dim), (SLOTS * WIDTH + 1, PAGE, key_heads, dim)
    shapes = ((ROWS, key_heads * group, dim), own, own, pool, pool)
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tables = torch.randperm(SLOTS * WIDTH).view(SLOTS, WIDTH).int() + 1
    tables[0, 0] = tables[6, 0]  # a prompt that two slots share
    slots, lengths, prompt_lengths = [6, 0, 2, 3, 5], [0, 63, 64, 100, 191], [1, 1, 33, 64, 128]
    where = [tables, *map(torch.tensor, (slots, lengths, prompt_lengths))]
    plain, fast = [each.clone().float() for each in tensors], [each.cuda() for each in tensors]
    expected = decode_attention(*plain, *where, dim**-0.5, window)
    found = decode_attention(*fast, *(each.cuda() for each in where), dim**-0.5, window)
    assert found.dtype == dtype
    assert float((found.cpu().float() - expected).abs().max()) < TOLERANCE[dtype]
    for number in POOLS:  # both write the new keys and values into the rows' pages, and change nothing else
        assert torch.equal(fast[number].cpu().float(), plain[number])
        assert int((fast[number].cpu() != tensors[number]).any(-1).any(-1).sum()) == ROWS
