"""The memory plan: what a run holds on its device, and how many tokens a batch may have beside it."""

from dataclasses import dataclass
from typing import Any

import torch

from podium.engine._cuda.decode_step import Capacity
from podium.engine._packed import packed_weights
from podium.engine.pool import num_processes
from podium.engine.vllm_local import MEMORY_SHARE
from podium.model.fused import SAVED_SHARE, is_compiled
from podium.model.load import Policy
from podium.model.logprobs import MAX_CHUNK_ELEMENTS, kept_bytes
from podium.model.memory import (
    available_bytes,
    cache_elements_per_token,
    checkpointed_bytes_per_token,
    device_bytes,
    saved_bytes_per_token,
)
from podium.sections import SeparateReference
from podium.settings import Settings
from podium.trainer._optimizer import state_bytes

USED_SHARE = 0.8
"""Of the device's memory; the rest is for what no plan knows: fragments, kernels' work space, other programs."""

MOST_TOKENS = {"cpu": 16384, "cuda": 65536}
MOST_FLOPS = 1.5e14
"""Larger batches are hardly faster. On a GPU what counts is the work of a pass, 6 operations a parameter and token. The
limit is chosen, not measured: 3.5 times the work at which 1.7B parameters are trained at 43 % of an H200's peak."""

LEAST_TOKENS = 2048
"""A batch smaller than this wastes time; before that, gradient checkpointing pays."""


HELD = ("weights", "trained", "optimizer", "reference", "engine_copy", "cache", "logits")
"""What a run holds whatever its batches are; "trained" stands for the gradients."""


@dataclass(frozen=True)
class MemoryPlan:
    """In bytes, unless it says tokens."""

    device: int
    """All that the device has, by which batches are cut: a resumed run must cut them alike."""
    available: int
    """What other programs leave of it at the moment."""
    weights: int
    trained: int
    optimizer: int
    reference: int
    engine_copy: int
    cache: int
    logits: int
    per_token: float
    """What a training pass keeps for each token of a batch."""
    max_tokens_per_batch: int
    longest_document: int
    """Tokens of the longest prompt and answer that the run can have."""
    tokens_per_step: int
    """Most tokens that a step can train."""
    gradient_checkpointing: bool

    @property
    def fixed(self) -> int:
        """Held whatever a batch is; gradients are as large as what is trained."""
        return sum(getattr(self, name) for name in HELD)

    @property
    def total(self) -> float:
        return self.fixed + self.per_token * self.largest_batch

    @property
    def largest_batch(self) -> int:
        """Tokens that a batch can really have: no more than a step has, and a document is never cut."""
        return max(min(self.max_tokens_per_batch, self.tokens_per_step), self.longest_document)

    @property
    def fits(self) -> bool:
        return self.total <= min(self.device, self.available)


def memory_plan(settings: Settings, policy: Policy, longest_prompt: int) -> MemoryPlan:
    """Keys that the settings leave open are decided here, by what the device has in all."""
    options = settings.trainer.options
    every = list(policy.model.named_parameters())
    weights = sum(p.numel() * p.element_size() for _, p in every)
    trained = sum(p.numel() * p.element_size() for _, p in every if p.requires_grad)
    longest_answer = settings.rollout.options.get("max_new_tokens", 0)
    longest = longest_prompt + longest_answer
    precision: torch.dtype = getattr(torch, options.get("precision", "float32"))
    tokens = settings.pack.max_tokens_per_batch
    most = tokens or most_tokens(policy.device.type, sum(p.numel() for _, p in every))
    a_step = settings.run.prompts_per_step * settings.run.rollouts_per_prompt * longest
    held: dict[str, Any] = {
        "device": device_bytes(policy.device),
        "available": available_bytes(policy.device),
        "weights": weights,
        "trained": trained,
        "optimizer": state_bytes(options.get("optimizer", "adamw"), [p for _, p in every if p.requires_grad]),
        "reference": trained if _copies_reference(settings, policy) else 0,
        "engine_copy": _engine_copy(settings, policy, trained),
        "cache": _cache(settings, policy, longest_prompt, longest_answer),
        "logits": _logits(policy, precision, max(min(most, a_step), longest)),
        "longest_document": longest,
        "tokens_per_step": a_step,
    }
    plain = saved_bytes_per_token(policy, None if precision == torch.float32 else precision)
    if is_compiled(policy.model, options.get("compile")):
        plain *= SAVED_SHARE
    checkpointing = options.get("gradient_checkpointing")
    if checkpointing is None:
        room = _room(held, plain)
        checkpointing = room < max(longest, LEAST_TOKENS)
    per_token = checkpointed_bytes_per_token(policy, plain) if checkpointing else plain
    if tokens is None:
        tokens = max(longest, min(most, _room(held, per_token)) // 256 * 256, 256)
    return MemoryPlan(**held, per_token=per_token, max_tokens_per_batch=tokens, gradient_checkpointing=checkpointing)


def _logits(policy: Policy, precision: torch.dtype, most_tokens: int) -> int:
    """Of a chunk, with what is made of them, and what the forward pass keeps: of the largest batch that there may be,
    since what it takes decides how large batches are."""
    itemsize = min(precision.itemsize, policy.model.dtype.itemsize)
    every = most_tokens * policy.vocabulary * itemsize
    return 3 * 4 * MAX_CHUNK_ELEMENTS[policy.device.type] + min(kept_bytes(policy.device), every)


def most_tokens(device_type: str, parameters: int) -> int:
    """Of a batch of a model so large, if there is memory for it."""
    most = MOST_TOKENS[device_type]
    return most if device_type == "cpu" else min(most, max(LEAST_TOKENS, int(MOST_FLOPS / 6 / parameters)))


def _room(held: dict[str, Any], per_token: float) -> int:
    """Tokens for which there is memory beside what is held."""
    return max(0, int((USED_SHARE * held["device"] - sum(held[name] for name in HELD)) / per_token))


def _copies_reference(settings: Settings, policy: Policy) -> bool:
    given = settings.model.reference
    if isinstance(given, SeparateReference):
        return False
    return given is not None and (policy.peft is None or given != "initial")


def _samples_elsewhere(settings: Settings) -> bool:
    """On a server's device, or on that of a runtime's rollout workers."""
    return settings.engine.name == "vllm_server" or "rollout_workers" in settings.runtime.options


def _engine_copy(settings: Settings, policy: Policy, trained: int) -> int:
    if _samples_elsewhere(settings):
        return 0
    engine, options = settings.engine.name, settings.engine.options
    weights = sum(map(_num_bytes, policy.twin.parameters()))
    member = (options["of"] or "inprocess") if engine == "pool" else engine
    packed = packed_weights(policy.twin) if member == "inprocess" else []
    copied = sum(map(_num_bytes, packed))
    if engine == "pool":  # each process may come to hold every weight
        return num_processes(options) * (weights + copied)
    if options.get("sleep"):
        return 0  # it gives its memory back while batches are trained
    if engine == "vllm_local":  # weights of its own; on a GPU its share holds the cache too
        share = options.get("memory_share") or MEMORY_SHARE
        return weights if policy.device.type == "cpu" else int(share * device_bytes(policy.device))
    if compute_dtype := _half_on_cuda(settings, policy):
        half = sum(p.numel() for p in policy.twin.parameters()) * compute_dtype.itemsize
        return half if policy.peft is not None or settings.run.sync_every == 1 else trained
    if policy.peft is None:
        return copied + (trained if settings.plan.needs_snapshot else 0)
    if policy.model.dtype != torch.float32:
        return 0  # it samples through the adapter's own layers
    adapted = [p for name, p in policy.model.named_parameters() if ".base_layer.weight" in name]
    return copied + sum(_num_bytes(p) for p in adapted if not any(p is other for other in packed))


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _half_on_cuda(settings: Settings, policy: Policy) -> torch.dtype | None:
    """The precision in which the in-process engine samples where it is not the weights'."""
    precision = settings.trainer.options.get("precision", "float32")
    is_half = policy.device.type == "cuda" and policy.model.dtype == torch.float32 and precision != "float32"
    return getattr(torch, precision) if is_half else None


def _cache(settings: Settings, policy: Policy, longest_prompt: int, longest_answer: int) -> int:
    """Keys and values of all rollouts that are written at the same time."""
    if "rollout_workers" in settings.runtime.options:
        return 0
    if settings.engine.name.startswith("vllm") and policy.device.type == "cuda":
        return 0  # within its share
    dtype = _half_on_cuda(settings, policy) or policy.model.dtype
    per_token = cache_elements_per_token(policy.model) * dtype.itemsize
    if policy.device.type == "cuda":  # a group shares its prompt's
        capacity = Capacity.fitting(
            per_token,
            policy.vocabulary,
            device_bytes(policy.device),
            rollouts=settings.plan.prompts_per_window * settings.run.rollouts_per_prompt,
            group=settings.run.rollouts_per_prompt,
            concurrency=num_slots(settings),
            longest=(longest_prompt, max(1, longest_answer)),
        )
        return capacity.cache_bytes(per_token, policy.vocabulary)
    return per_token * num_slots(settings) * (longest_prompt + longest_answer)


def num_slots(settings: Settings) -> int:
    """Rollouts that the in-process engine writes at the same time."""
    rollouts = settings.plan.prompts_ahead * settings.run.rollouts_per_prompt
    given = settings.engine.options.get("concurrency")
    return min(given, rollouts) if isinstance(given, int) and settings.engine.name != "pool" else rollouts
