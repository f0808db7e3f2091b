import copy

import pytest
import torch

from podium.engine.decoding.linear import AdaptedLinear
from podium.model.forward import ExactLinear


@pytest.mark.parametrize("kind", [torch.nn.Linear, ExactLinear])
@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_what_peft_computes_under_autocast(bias: bool, kind: type[torch.nn.Linear]) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = torch.nn.Sequential(kind(24, 16, bias=bias))
    base = copy.deepcopy(model[0])
    base.weight.data = base.weight.data.bfloat16()
    if bias and kind is torch.nn.Linear:
        base.bias.data = base.bias.data.bfloat16()
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=["0"], init_lora_weights=False))
    layer = model[0]
    adapted = AdaptedLinear(base, rank=4, scale=3.0)
    adapted.load(layer.lora_A["default"].weight.detach(), layer.lora_B["default"].weight.detach())
    x = torch.randn(5, 24)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(adapted(x), peft(x))
        assert not torch.equal(adapted(x), base(x))
