"""The kernel of decode attention gives what its plain form gives, for every form of it that a head's shape asks for."""

import pytest
import torch

from podium.engine._cuda.decode_attention import decode_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

ROWS, SLOTS, COLUMNS, PROMPTS, PROMPT_COLUMNS = 5, 7, 192, 3, 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02}


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("dim", "key_heads", "group"), [(64, 3, 3), (128, 8, 2), (128, 1, 32), (256, 2, 4)])
def test_the_kernel_gives_what_the_plain_form_gives(
    dim: int, key_heads: int, group: int, dtype: torch.dtype, window: int
) -> None:
    torch.manual_seed(0)
    slots, prompts = (SLOTS, COLUMNS, key_heads, dim), (PROMPTS, PROMPT_COLUMNS, key_heads, dim)
    tensors = [
        torch.randn(shape).to(dtype) for shape in ((ROWS, key_heads * group, dim), slots, slots, prompts, prompts)
    ]
    where = [torch.tensor(row) for row in ([6, 0, 2, 3, 5], [0, 31, 32, 100, 191], [0, 0, 1, 2, 2], [1, 1, 33, 64, 64])]
    expected = decode_attention(*(each.float() for each in tensors), *where, dim**-0.5, window)
    found = decode_attention(*(each.cuda() for each in (*tensors, *where)), dim**-0.5, window)
    assert found.dtype == dtype
    assert float((found.cpu().float() - expected).abs().max()) < TOLERANCE[dtype]
