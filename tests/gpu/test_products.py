"""On CUDA too, and compiled, the residual stream gets sums that nobody has rounded."""

import pytest
import torch

from podium.model.forward import ExactLinear

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler warns of its own parts
]


@pytest.mark.parametrize("compiled", [False, True])
def test_sums_and_gradients_are_those_of_the_rounded_factors(compiled: bool) -> None:
    torch.manual_seed(0)
    layer = ExactLinear(1536, 576, bias=False).cuda()
    x, residual = torch.randn(1, 300, 1536, device="cuda", requires_grad=True), torch.randn(1, 300, 576, device="cuda")

    def added(x: torch.Tensor) -> torch.Tensor:
        return residual + layer(x)

    with torch.autocast("cuda", dtype=torch.bfloat16):
        made = (torch.compile(added, dynamic=True, fullgraph=True) if compiled else added)(x)
    made.backward(residual)

    a, b, g = (tensor.detach().bfloat16().double()[0] for tensor in (x, layer.weight[None], residual))
    assert made.dtype == torch.float32
    assert (made[0] - residual[0] - a @ b.T).abs().max() < 1e-4
    assert x.grad is not None
    assert layer.weight.grad is not None
    assert (x.grad[0] - g @ b).abs().max() < 2**-7 * (g @ b).abs().max()
    assert (layer.weight.grad - g.T @ a).abs().max() < 1e-3
