"""The kernel of logprobs gives what the plain code gives: values, entropies and gradients."""

import pytest
import torch

from podium.model import forward as module
from podium.model.forward import token_logprobs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("vocabulary", [97, 4096, 9001])
@pytest.mark.parametrize("kept_share", [0.0, 1 / 8])
def test_the_kernel_gives_what_the_plain_code_gives(monkeypatch, softcap, vocabulary, kept_share) -> None:
    monkeypatch.setattr(module, "KEPT_SHARE_OF_GPU", kept_share)
    monkeypatch.setitem(module.MAX_CHUNK_ELEMENTS, "cuda", 7 * vocabulary)
    torch.manual_seed(0)
    hidden, weight = 3 * torch.randn(30, 16), torch.randn(vocabulary, 16)
    targets, pull = torch.randint(0, vocabulary, (30,)), torch.randn(30)

    def outcome(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [each.to(device, dtype).requires_grad_() for each in (hidden, weight)]
        logprobs, entropy = token_logprobs(*leaves, targets.to(device), temperature=0.7, softcap=softcap)
        (logprobs * pull.to(device)).sum().backward()
        return [each.detach().cpu() for each in (logprobs, entropy, *(leaf.grad for leaf in leaves))]

    for found, expected in zip(outcome("cuda", torch.float32), outcome("cpu", torch.float64), strict=True):
        assert torch.allclose(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_in_half_precision_only_the_products_round() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).bfloat16(), torch.randn(5000, 32).bfloat16()
    targets = torch.randint(0, 5000, (64,))
    grads = []
    for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float64)):
        leaves = [each.to(device, dtype).requires_grad_() for each in (hidden, weight)]
        token_logprobs(*leaves, targets.to(device))[0].sum().backward()
        grads.append([leaf.grad.double().cpu() for leaf in leaves])
    for found, expected in zip(*grads, strict=True):
        assert float((found - expected).norm() / expected.norm()) < 0.01


def test_the_kernel_has_one_form_however_many_rows_there_are() -> None:
    """Where a chunk's targets and results begin depends on it."""
    from podium.model.softmax_kernel import _softmax_rows, softmax_rows

    def forms_after(rows: int, begin: int) -> int:
        targets = torch.zeros(begin + rows, dtype=torch.long, device="cuda")[begin:]
        softmax_rows(torch.randn(rows, 512, device="cuda"), targets, 1.0, None, None)
        return len(_softmax_rows.device_caches[torch.cuda.current_device()][0])

    assert len({forms_after(rows, begin) for rows, begin in ((4, 0), (5, 0), (6, 1), (16, 1))}) == 1
