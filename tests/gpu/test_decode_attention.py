"""The kernel of decode attention gives what its plain form gives, for every form of it that a head's shape asks for."""

import pytest
import torch

from podium.engine.cuda.decode_attention import decode_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ROWS, SLOTS, COLUMNS, PROMPTS, PROMPT_COLUMNS = 5, 7, 192, 3, 64
CACHES = (3, 4)
"""Of the tensors that go in: the slots' keys and values."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("dim", "key_heads", "group"), [(64, 3, 3), (128, 8, 2), (128, 1, 32), (256, 2, 4)])
def test_the_kernel_gives_what_the_plain_form_gives(
    dim: int, key_heads: int, group: int, dtype: torch.dtype, window: int
) -> None:
    torch.manual_seed(0)
    slots, prompts = (SLOTS, COLUMNS, key_heads, dim), (PROMPTS, PROMPT_COLUMNS, key_heads, dim)
    own = (ROWS, key_heads, dim)
    shapes = ((ROWS, key_heads * group, dim), own, own, slots, slots, prompts, prompts)
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    where = [torch.tensor(row) for row in ([6, 0, 2, 3, 5], [0, 31, 32, 100, 191], [0, 0, 1, 2, 2], [1, 1, 33, 64, 64])]
    plain, fast = [each.clone().float() for each in tensors], [each.cuda() for each in tensors]
    expected = decode_attention(*plain, *where, dim**-0.5, window)
    found = decode_attention(*fast, *(each.cuda() for each in where), dim**-0.5, window)
    assert found.dtype == dtype
    assert float((found.cpu().float() - expected).abs().max()) < TOLERANCE[dtype]
    for number in CACHES:  # both lay the new keys and values into the slots, and change nothing else
        assert torch.equal(fast[number].cpu().float(), plain[number])
        assert int((fast[number].cpu() != tensors[number]).any(-1).any(-1).sum()) == ROWS
