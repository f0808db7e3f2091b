"""What the in-process engine shows of its weights (model/evidence.py), read from the layers that it samples with."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from podium.engine.cuda.joined import AdaptedLinear
from podium.engine.decoding.plain import PackedLinear
from podium.model.evidence import Held, Shown, branch_input, branch_views, shown

Halves = tuple[torch.Tensor, torch.Tensor]
"""A and B of one adapted layer."""


@torch.no_grad()
def held_full(model: PreTrainedModel, faults: Iterable[str] = ()) -> Held:
    """Every parameter; where a layer multiplies with a packed copy, that copy is compared with its parameter."""
    stale = [
        f"{name} multiplies with a packed copy of other weights"
        for name, module in model.named_modules()
        if isinstance(module, PackedLinear) and not torch.equal(module.unpacked(), module.weight)
    ]
    return Held({name: shown(tensor) for name, tensor in model.named_parameters()}, faults=(*faults, *stale))


@torch.no_grad()
def held_adapter(
    model: PreTrainedModel,
    layers: Iterable[str],
    base: Mapping[str, torch.Tensor],
    laid: Mapping[str, Halves],
    scale: float,
    faults: Iterable[str] = (),
) -> Held:
    """The halves that each layer was given, and its branch; `base` and `laid` are of layers that merge them.

    A merged layer has no branch. It is computed once more as base + scale·B·A, which gives the same bits.
    """
    tensors: dict[str, Shown] = {}
    scales: dict[str, float] = {}
    branches: dict[str, torch.Tensor] = {}
    found = list(faults)
    for layer in layers:
        module: Any = model.get_submodule(layer)
        if isinstance(module, AdaptedLinear):
            a, b, scales[layer] = module.a, module.b, module.scale
            branches[layer] = module.branch(branch_input(a.shape[1], a.device, a.dtype))[0]
        elif layer not in laid:
            found.append(f"no adapter was applied to {layer}")
            continue
        else:
            (a, b), scales[layer] = laid[layer], scale
            if not torch.equal(_weight(module), merged(base[layer], a, b, scale)):
                found.append(f"{layer} does not equal its base weights plus the adapter")
        tensors |= {f"{layer}.lora_A": shown(a), f"{layer}.lora_B": shown(b)}
    views = torch.stack([branch_views(output) for output in branches.values()]).tolist() if branches else []
    return Held(tensors, scales, dict(zip(branches, views, strict=True)), faults=tuple(found))


def merged(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """base + scale·B·A"""
    return torch.addmm(base.to(a.dtype), b, a, alpha=scale)


def _weight(module: Any) -> torch.Tensor:
    """What the layer really multiplies with."""
    return module.unpacked() if isinstance(module, PackedLinear) else module.weight
