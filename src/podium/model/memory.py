"""How many bytes a device has, and how many a training pass keeps for each token."""

import os
from pathlib import Path
from typing import Any

import torch

from podium.model.forward import batch_of, place, policy_logprobs
from podium.model.load import Policy

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def device_bytes(device: torch.device) -> int:
    """All that the device has: what is free at the moment would make a resumed run cut its batches differently."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.is_file() else "max"
    return physical if limit == "max" else min(physical, int(limit))


def saved_bytes_per_token(policy: Policy, compute_dtype: torch.dtype | None) -> float:
    """What the forward pass keeps for the backward one, from two passes of different length."""
    long = min(96, policy.max_context_tokens)
    short = long // 3
    kept = [_saved_bytes(policy, length, compute_dtype) for length in (short, long)]
    return (kept[1] - kept[0]) / (long - short)


def checkpointed_bytes_per_token(policy: Policy, plain: float) -> float:
    """With gradient checkpointing: each layer's input, and one layer's inside at a time."""
    config: Any = policy.model.config
    return config.num_hidden_layers * config.hidden_size * 4 + plain / config.num_hidden_layers


def _saved_bytes(policy: Policy, length: int, compute_dtype: torch.dtype | None) -> int:
    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    placed = place(batch_of([1 + i % 7 for i in range(length)]), policy.device)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logprobs = policy_logprobs(policy.model, placed, compute_dtype)[0]  # held, so that no storage is used twice
    del logprobs
    return sum(kept.values())
