"""What vLLM's workers show of their weights (model/evidence.py): functions that run inside a worker.

An adapter is read from the slot that requests of this version use. Full weights are read as they are stored. On a CPU
vLLM packs a linear layer's weights in a form that cannot be read, so unit vectors go through its own kernel: each gives
one column, exactly. The columns change with the version.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from podium.model.evidence import Held, branch_output, branch_views, shown

Halves = dict[str, tuple[torch.Tensor, torch.Tensor]]
NUM_COLUMNS = 4


def held_adapter(engine: Any, adapter: Any, layers: Sequence[str], rank: int) -> Held:
    """Every worker of vLLM's engine must hold the same two halves of every layer."""
    if adapter is None:
        return Held({}, faults=("its requests carry no adapter",))
    workers: list[Halves] = engine.collective_rpc(adapter_halves, args=(adapter.lora_int_id, list(layers), rank))
    missing = [layer for layer in layers for halves in workers if layer not in halves]
    if missing:
        return Held({}, faults=(f"vLLM has no adapter on {missing[0]}",))
    first = workers[0]
    for halves in workers[1:]:
        for layer, (a, b) in halves.items():
            if not (torch.equal(a, first[layer][0]) and torch.equal(b, first[layer][1])):
                return Held({}, faults=(f"its workers hold different adapters on {layer}",))
    tensors = {f"{layer}.lora_A": shown(a) for layer, (a, _) in first.items()}
    tensors |= {f"{layer}.lora_B": shown(b, is_scaled=True) for layer, (_, b) in first.items()}
    views = torch.stack([branch_views(branch_output(a, b, 1.0)) for a, b in first.values()]).tolist()
    return Held(tensors, branches=dict(zip(first, views, strict=True)))


def held_full(engine: Any, shapes: Mapping[str, Sequence[int]], version: int) -> Held:
    """Of the one worker, which has complete weights."""
    [found] = engine.collective_rpc(full_weights, args=(dict(shapes), version))
    tensors = {name: shown(tensor, columns=columns) for name, (tensor, columns) in found.items()}
    return Held(tensors, unseen=tuple(name for name in shapes if name not in tensors))


def adapter_halves(worker: Any, adapter_id: int, layers: Sequence[str], rank: int) -> Halves:
    """A and scale·B of each layer that has them; with tensor parallelism, as they were before vLLM split them."""
    manager = worker.model_runner.lora_manager._adapter_manager
    names = _names_in_vllm(manager.model, layers)
    packed = {part: (whole, k) for whole, parts in manager.packed_modules.items() for k, part in enumerate(parts)}
    found: Halves = {}
    for layer, name in names.items():
        whole, part = packed.get(name, (name, 0))
        module = manager.modules.get(whole)
        if module is None or manager.model.get_submodule(whole) is not module:
            continue
        if module.tp_size > 1:
            lora = manager._registered_adapters[adapter_id].loras.get(whole)
            a, b = lora.lora_a, lora.lora_b
            found[layer] = (a[part], b[part]) if isinstance(a, list) else (a, b)
        elif adapter_id in manager.lora_index_to_id:
            slot = manager.lora_index_to_id.index(adapter_id)
            stacked_a, stacked_b = module.lora_a_stacked[part], module.lora_b_stacked[part]
            found[layer] = stacked_a[slot, 0, :rank], stacked_b[slot, 0, :, :rank]
    return found


@torch.no_grad()
def full_weights(
    worker: Any, shapes: Mapping[str, Sequence[int]], version: int
) -> dict[str, tuple[torch.Tensor, tuple[int, ...] | None]]:
    """Tensors that can be read, each with its columns, or None if it is complete."""
    model = worker.model_runner.model
    modules = dict(model.named_modules(remove_duplicate=False))
    names = _names_in_vllm(model, list(shapes))
    fused = getattr(model, "packed_modules_mapping", {})
    found = {}
    for name, own in names.items():
        path, _, kind = own.rpartition(".")
        module, first = modules.get(path), 0
        if module is None:
            parent, _, leaf = path.rpartition(".")
            whole, parts = next(((w, p) for w, p in fused.items() if leaf in p), ("", []))
            module = modules.get(f"{parent}.{whole}")
            before = [name.replace(f".{leaf}.", f".{part}.") for part in parts[: parts.index(leaf)]] if parts else []
            first = sum(shapes[each][0] for each in before if each in shapes)
        if module is not None and (shown := _shown(module, kind, first, shapes[name], version)) is not None:
            found[name] = shown
    return found


def _shown(
    module: Any, kind: str, first: int, shape: Sequence[int], version: int
) -> tuple[torch.Tensor, tuple[int, ...] | None] | None:
    tensor = getattr(module, kind, None)
    rows = slice(first, first + shape[0])
    if tensor is None or len(shape) == 0:
        return None
    is_packed = kind == "weight" and hasattr(module, "cpu_linear")
    if not is_packed:
        return (tensor[rows], None) if tensor[rows].shape == torch.Size(shape) else None
    if len(shape) != 2:
        return None
    columns = columns_of(shape[1], version)
    dtype = module.params_dtype if hasattr(module, "params_dtype") else tensor.dtype
    units = torch.zeros(len(columns), shape[1], dtype=dtype)
    units[range(len(columns)), list(columns)] = 1
    return module.cpu_linear(units, tensor, None)[:, rows].t(), columns


def columns_of(width: int, version: int) -> tuple[int, ...]:
    """A few different columns; the next version gets others."""
    count = min(NUM_COLUMNS, width)
    return tuple(sorted({(version * count + k) % width for k in range(count)}))


def _names_in_vllm(model: Any, names: Sequence[str]) -> dict[str, str]:
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return {name: name for name in names}
    renamed = mapper.get_rename_mapper()
    return {name: mapped for name in names if (mapped := renamed.map_name(name)) is not None}
