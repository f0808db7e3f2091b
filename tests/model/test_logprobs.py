"""The chunked logprobs against torch's own log-softmax, value and gradient."""

import pytest
import torch

from podium.model import forward as module
from podium.model.forward import token_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk_elements", [1, 40, 1 << 20])
@pytest.mark.parametrize("kept_rows", [0, 5, 11])
def test_equal_to_a_plain_log_softmax(monkeypatch, temperature, softcap, chunk_elements, kept_rows) -> None:
    monkeypatch.setitem(module.MAX_CHUNK_ELEMENTS, "cpu", chunk_elements)
    monkeypatch.setattr(module, "KEPT_BYTES_ON_CPU", kept_rows * 13 * 4)
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 6), torch.randn(13, 6)
    targets, pull = torch.randint(0, 13, (11,)), torch.randn(11)

    def plain(hidden, weight):
        logits = hidden @ weight.t()
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        all_ = (logits / temperature).log_softmax(-1)
        return all_.gather(-1, targets[:, None])[:, 0], -(all_.exp() * all_).sum(-1)

    mine = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    theirs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found, entropy = token_logprobs(*mine, targets, temperature=temperature, softcap=softcap)
    expected, expected_entropy = plain(*theirs)
    (found * pull).sum().backward()
    (expected * pull).sum().backward()
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-5)


def test_no_more_logits_exist_than_a_chunk_holds_and_those_of_the_first_chunks_are_made_once(monkeypatch) -> None:
    monkeypatch.setitem(module.MAX_CHUNK_ELEMENTS, "cpu", 50)
    monkeypatch.setattr(module, "KEPT_BYTES_ON_CPU", 17 * 10 * 4)  # three chunks of five rows, not 17 rows
    sizes = []
    real = module.logits_of
    monkeypatch.setattr(module, "logits_of", lambda *args: sizes.append(real(*args).numel()) or real(*args))
    hidden, weight = torch.randn(100, 4, requires_grad=True), torch.randn(10, 4)
    made = token_logprobs(hidden, weight, torch.zeros(100, dtype=torch.long))[0]
    made.sum().backward(retain_graph=True)
    assert max(sizes) <= 50
    assert sum(sizes) == 100 * 10 + (100 - 3 * 5) * 10  # forward, and backward but for what was kept
    first = hidden.grad.clone()
    with torch.no_grad():
        nothing_to_keep = token_logprobs(hidden, weight, torch.zeros(100, dtype=torch.long))[0]
    assert nothing_to_keep.grad_fn is None
    sizes.clear()
    hidden.grad = None
    made.sum().backward()  # a second time, when nothing is kept any more
    assert torch.equal(hidden.grad, first)
    assert sum(sizes) == 100 * 10


def test_the_weight_needs_no_gradient_under_lora() -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    token_logprobs(hidden, weight, torch.tensor([0, 1, 2]))[0].sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None
