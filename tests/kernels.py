"""Each Triton kernel beside the plain code, on tensors of a CPU: `TRITON_INTERPRET=1 python -m tests.kernels NAME`.

Triton's interpreter runs a kernel's own lines, so what a kernel computes is tested without a GPU; what a GPU makes of
it is asked in tests/gpu.
"""

import json
import traceback
from collections.abc import Callable

import torch


def flash_decode() -> None:
    from podium.engine.cuda.decode_step import decode_attention
    from podium.engine.cuda.kernels import flash_decode
    from podium.engine.cuda.roster import PAGE

    tables = torch.randperm(29)[:28].view(7, 4).int()  # four pages for each of seven slots
    tables[0, :1] = tables[6, :1]  # a prompt that two slots share
    where = [tables, *(torch.tensor(row) for row in ([6, 0, 2, 3], [0, 63, 64, 100], [64, 64, 33, 128]))]
    for dim, key_heads, group, window in ((64, 3, 3, 0), (64, 3, 3, 50), (128, 1, 2, 0), (48, 1, 18, 0)):
        pages = (29, PAGE, key_heads, dim)
        product = torch.randn(
            4, (group + 2) * key_heads, dim
        )  # of queries, keys and values, which are parts of its rows
        own = list(product.split([group * key_heads, key_heads, key_heads], 1))
        plain = [*own, *(torch.randn(shape) for shape in (pages, pages))]
        interpreted = [*own, *(each.clone() for each in plain[3:])]
        expected = decode_attention(*plain, *where, dim**-0.5, window)
        found = flash_decode(*interpreted, *where, dim**-0.5, window)
        assert torch.allclose(found, expected, atol=1e-5)
        assert all(map(torch.equal, interpreted, plain))  # the pages among them, with their new columns


def softmax_rows() -> None:
    from podium.model.forward import _softmax
    from podium.model.softmax_kernel import softmax_rows

    for vocabulary, softcap in ((97, None), (4096, 20.0), (9001, None)):
        logits = 3 * torch.randn(5, vocabulary)
        targets = torch.randint(0, vocabulary, (5,))
        mine, exact = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.float64)
        found = softmax_rows(logits, targets, 0.7, softcap, mine)
        expected = _softmax(logits.double(), targets, 0.7, softcap, exact)
        for a, b in zip((*found, mine), (*expected, exact), strict=True):
            assert torch.allclose(a.double(), b, atol=1e-5)
        without = softmax_rows(logits, targets, 0.7, softcap, None)
        assert all(map(torch.equal, without, found))


def block_masses() -> None:
    from podium.engine.cuda.kernels import block_masses_on_cuda
    from podium.engine.decoding.sampling import block_masses

    for vocabulary in (100, 512, 5000):
        logits, temperature = 5 * torch.randn(7, vocabulary), torch.rand(7) + 0.5
        logits[0], logits[0, 3] = -torch.inf, 0.0  # blocks without any probability
        assert torch.allclose(block_masses_on_cuda(logits, temperature), block_masses(logits, temperature), atol=1e-5)


def add_branches() -> None:
    from podium.engine.cuda.kernels import add_branches_on_cuda
    from podium.engine.decoding.linear import add_branches

    for rows, outputs, inner in ((1, 24, 16), (9, 300, 32), (130, 129, 64), (20, 140, 512)):
        product, b = torch.randn(rows, outputs + inner), torch.randn(outputs, inner)
        expected, found = product.clone(), product.clone()
        add_branches(expected, b, 2.0)
        add_branches_on_cuda(found, b, 2.0)
        assert torch.allclose(found, expected, atol=1e-4)
        assert torch.equal(found[:, outputs:], product[:, outputs:])
        exact = product[:, :outputs].double() + 2 * product[:, outputs:].double() @ b.double().t()
        assert torch.allclose(found[:, :outputs].double(), exact, atol=1e-4)


EACH = (flash_decode, softmax_rows, block_masses, add_branches)
KERNELS: dict[str, Callable[[], None]] = {each.__name__: each for each in EACH}

if __name__ == "__main__":
    for name, compare in KERNELS.items():
        torch.manual_seed(0)
        try:
            compare()
        except Exception:
            print(json.dumps({name: traceback.format_exc()}), flush=True)
        else:
            print(json.dumps({name: "right"}), flush=True)
