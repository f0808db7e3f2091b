"""How many bytes a device has, and how many bytes per token a training pass keeps."""

import os
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from podium.model.forward import batch_of, decoder_states, head_weight, place, policy_logprobs, text_config
from podium.model.load import Policy

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USED = Path("/sys/fs/cgroup/memory.current")
CGROUP_USE = Path("/sys/fs/cgroup/memory.stat")
MEMORY_NOW = Path("/proc/meminfo")
OWN_PAGES = Path("/proc/self/statm")


def device_bytes(device: torch.device) -> int:
    """All memory of the device. Free memory changes over time, so a resumed run would split batches differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    return physical if limit == "max" else min(physical, int(limit))


def available_bytes(device: torch.device) -> int:
    """What this process holds plus what is free now; other programs hold the rest."""
    everything = device_bytes(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(everything, free + torch.cuda.memory_reserved(device))
    own = int(OWN_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if OWN_PAGES.is_file() else 0
    return min(everything, own + min(_free_of_machine(everything), _free_of_group(everything)))


def unused_bytes(device: torch.device) -> int:
    """What this process could still take on the device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    everything = device_bytes(device)
    return min(_free_of_machine(everything), _free_of_group(everything))


def _free_of_machine(everything: int) -> int:
    """What Linux reports as available without swapping; on other systems, everything."""
    lines = MEMORY_NOW.read_text().splitlines() if MEMORY_NOW.is_file() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else everything


def _free_of_group(everything: int) -> int:
    """The same for a container with a limit; its file cache counts as free, because it is dropped when needed."""
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    if limit == "max" or not CGROUP_USED.is_file():
        return everything
    lines = CGROUP_USE.read_text().splitlines() if CGROUP_USE.is_file() else []
    files = sum(int(line.split()[1]) for line in lines if line.split()[0] in ("inactive_file", "active_file"))
    return int(limit) - int(CGROUP_USED.read_text()) + files


@torch.no_grad()
def cache_elements_per_token(model: PreTrainedModel, compute_dtype: torch.dtype | None = None) -> int:
    """Numbers per token in the key-value cache of all layers; measured, because configs express it in many ways."""
    cache = DynamicCache()
    one = torch.zeros(1, 1, dtype=torch.long, device=head_weight(model).device)
    with torch.autocast(one.device.type, dtype=compute_dtype, enabled=compute_dtype is not None):
        decoder_states(model, input_ids=one, position_ids=one, past_key_values=cache, use_cache=True)
    kept = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.numel() for tensor in kept if tensor is not None)


def saved_bytes_per_token(policy: Policy, compute_dtype: torch.dtype | None) -> float:
    """What the forward pass keeps for the backward pass, measured with two passes of different length."""
    long = min(96, policy.max_context_tokens)
    short = long // 3
    kept = [_saved_bytes(policy, length, compute_dtype) for length in (short, long)]
    return (kept[1] - kept[0]) / (long - short)


def checkpointed_bytes_per_token(policy: Policy, plain: float) -> float:
    """With gradient checkpointing: each layer's input, and the inside of one layer at a time."""
    config = text_config(policy.model.config)
    return config.num_hidden_layers * config.hidden_size * 4 + plain / config.num_hidden_layers


def _saved_bytes(policy: Policy, length: int, compute_dtype: torch.dtype | None) -> int:
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    placed = place(batch_of([1 + i % 7 for i in range(length)]), policy.device)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logprobs = policy_logprobs(policy.model, placed, compute_dtype)[0]  # kept alive, so that no storage is reused
    del logprobs
    return sum(kept.values())
