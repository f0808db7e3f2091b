"""The memory plan: what a run holds on its device, and how many tokens a batch may have in the memory that is left.

In: settings, the loaded policy, the longest prompt. Out: `MemoryPlan`. Keys that the settings leave open (tokens per
batch, gradient checkpointing) are decided here, by the size of the device, and so is how much of a GPU the in-process
engine's keys and values take: training gets what it needs at least, then they get what the run can need, and larger
batches get the rest.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from podium.engine.cuda.decode_step import Capacity
from podium.engine.cuda.roster import LEAST_BATCH
from podium.engine.decoding.linear import packed_weights
from podium.engine.pool import num_processes
from podium.engine.vllm_local import MEMORY_SHARE
from podium.model.forward import MAX_CHUNK_ELEMENTS, kept_bytes, products_dtype
from podium.model.fused import SAVED_SHARE, is_compiled
from podium.model.load import Policy
from podium.model.memory import (
    available_bytes,
    cache_elements_per_token,
    checkpointed_bytes_per_token,
    device_bytes,
    saved_bytes_per_token,
)
from podium.settings.lookup import engine_traits
from podium.settings.sections import SeparateReference
from podium.settings.tables import Settings
from podium.trainer import state_bytes

USED_SHARE = 0.8
"""Share of the device's memory that is planned; the rest is for fragments, work space of kernels, other programs."""

MOST_TOKENS = {"cpu": 16384, "cuda": 65536}
MOST_FLOPS = 1.5e14
"""Larger batches are hardly faster. On a GPU the work of a pass counts: 6 operations per parameter and token, 4 where
the weights are frozen under an adapter. The limit
is chosen, not measured: 3.5 times the work at which 1.7B parameters are trained at 43 % of an H200's peak."""

LEAST_TOKENS = 2048
"""A smaller batch wastes time; gradient checkpointing is used before batches get smaller than this."""
CACHE_ROOM = 0.5
"""Share of the room beside what is held that keys and values may claim before batches of more than LEAST_TOKENS get it.
Chosen, not measured: where both want more than there is, halves slow neither side down by much."""

HELD = ("weights", "trained", "optimizer", "reference", "engine_copy", "cache", "logits")
"""What a run holds whatever the size of its batches; "trained" counts the gradients, which are as large."""


@dataclass(frozen=True)
class MemoryPlan:
    """In bytes, unless it says tokens."""

    device: int
    """All memory of the device. Batches are sized by it, so that a resumed run has the same batches."""
    available: int
    """Memory that other programs leave free at the moment."""
    weights: int
    trained: int
    optimizer: int
    reference: int
    engine_copy: int
    cache: int
    """Keys and values, and what else grows with the rollouts that are written at the same time: what the in-process
    engine on a GPU takes for training."""
    logits: int
    per_token: float
    """Bytes that a training pass keeps per token of a batch."""
    max_tokens_per_batch: int
    longest_document: int
    """Tokens of the longest prompt with the longest answer."""
    tokens_per_step: int
    """Most tokens that a step can train."""
    gradient_checkpointing: bool

    @property
    def cache_limit(self) -> int:
        """Most that the engine's keys and values may take: an evaluation may need more of them than training."""
        return max(self.cache, int(USED_SHARE * self.device - (self.total - self.cache)))

    @property
    def total(self) -> float:
        return sum(getattr(self, name) for name in HELD) + self.per_token * self.largest_batch

    @property
    def largest_batch(self) -> int:
        """Tokens that a batch can have in this run: at most those of a step, and a document is never cut."""
        return max(min(self.max_tokens_per_batch, self.tokens_per_step), self.longest_document)

    @property
    def fits(self) -> bool:
        return self.total <= min(self.device, self.available)


def memory_plan(settings: Settings, policy: Policy, longest_prompt: int) -> MemoryPlan:
    """`longest_prompt` in tokens, of the training data."""
    options, reference = settings.trainer.options, settings.model.reference
    every = list(policy.model.parameters())
    trainable = [p for p in every if p.requires_grad]
    trained = sum(p.nbytes for p in trainable)
    copies_reference = reference is not None and not isinstance(reference, SeparateReference)
    copies_reference &= policy.peft is None or reference != "initial"
    longest_answer = settings.max_answer_tokens or 0
    longest = longest_prompt + longest_answer
    compute_dtype = products_dtype(options.get("precision"), policy.model.dtype)
    tokens = settings.pack.max_tokens_per_batch
    operations = 6 if policy.peft is None else 4
    most = tokens or most_tokens(policy.device.type, operations * sum(p.numel() for p in every))
    a_step = settings.run.prompts_per_step * settings.run.rollouts_per_prompt * longest
    held: dict[str, Any] = {
        "device": device_bytes(policy.device),
        "available": available_bytes(policy.device),
        "weights": sum(p.nbytes for p in every),
        "trained": trained,
        "optimizer": state_bytes(options.get("optimizer", "adamw"), trainable),
        "reference": trained if copies_reference else 0,
        "engine_copy": _engine_copy(settings, policy, trained),
        "cache": 0,
        "logits": _logits(policy, compute_dtype or policy.model.dtype, max(min(most, a_step), longest)),
        "longest_document": longest,
        "tokens_per_step": a_step,
    }
    plain = saved_bytes_per_token(policy, compute_dtype)
    if is_compiled(policy.model):
        plain *= SAVED_SHARE
    needed = _cache(settings, policy, longest_prompt, longest_answer)
    held["cache"] = needed.least
    checkpointing = options.get("gradient_checkpointing")
    if checkpointing is None:
        checkpointing = _room(held) / plain < max(longest, LEAST_TOKENS)
    per_token = checkpointed_bytes_per_token(policy, plain) if checkpointing else plain
    if tokens is None:
        least = max(longest, min(LEAST_TOKENS, int(_room(held) / per_token)))
        held["cache"] += min(needed.most - needed.least, max(0, int(CACHE_ROOM * _room(held))))
        tokens = max(least, min(most, int(_room(held) / per_token)) // 256 * 256, 256)
        held["cache"] = needed.least
    plan = MemoryPlan(**held, per_token=per_token, max_tokens_per_batch=tokens, gradient_checkpointing=checkpointing)
    left = _room(held) - per_token * plan.largest_batch
    return replace(plan, cache=min(needed.most, needed.least + max(0, int(left))))


def _logits(policy: Policy, precision: torch.dtype, most_tokens: int) -> int:
    """Bytes of the logits of one chunk and of what is computed from them, and what the forward pass keeps for the
    largest possible batch, since this number decides how large batches are."""
    itemsize = min(precision.itemsize, policy.model.dtype.itemsize)
    every = most_tokens * policy.vocabulary * itemsize
    return 3 * 4 * MAX_CHUNK_ELEMENTS[policy.device.type] + min(kept_bytes(policy.device), every)


def most_tokens(device_type: str, flops_per_token: int) -> int:
    """Largest useful batch of a model with that much work per token, if there is memory for it."""
    most = MOST_TOKENS[device_type]
    return most if device_type == "cpu" else min(most, max(LEAST_TOKENS, int(MOST_FLOPS / flops_per_token)))


def _room(held: dict[str, Any]) -> float:
    """Memory next to what is held, in bytes; below 0 where that is too much already."""
    return USED_SHARE * held["device"] - sum(held[name] for name in HELD)


def _engine_copy(settings: Settings, policy: Policy, trained: int) -> int:
    if settings.engine_traits.outlives_run or "rollout_workers" in settings.runtime.options:
        return 0  # a server or a runtime's rollout workers have it on a device of their own
    options, member = settings.engine.options, settings.engine_member
    weights = sum(p.nbytes for p in policy.twin.parameters())
    shares_weights = engine_traits(member or settings.engine.name).shares_weights
    packed = packed_weights(policy.twin) if shares_weights else []
    copied = sum(p.nbytes for p in packed)
    if settings.engine_traits.has_members:  # each process may come to hold every weight
        return num_processes(options) * (weights + copied)
    if options.get("sleep"):
        return 0  # the engine gives its memory back during a step
    if "memory_share" in options and policy.device.type == "cuda":  # its share includes the cache
        return int((options["memory_share"] or MEMORY_SHARE) * device_bytes(policy.device))
    if not shares_weights:
        return weights
    if policy.peft is not None and policy.model.dtype != torch.float32:
        return trained  # the adapter in half precision, and the blocks of zeros between its halves
    if compute_dtype := _half_on_cuda(settings, policy):
        half = sum(p.numel() for p in policy.twin.parameters()) * compute_dtype.itemsize
        return half if policy.peft is not None or settings.run.sync_every == 1 else trained
    if policy.peft is None:
        return copied + (trained if settings.plan.needs_snapshot else 0)
    adapted = [p for name, p in policy.model.named_parameters() if ".base_layer.weight" in name]
    return copied + sum(p.nbytes for p in adapted if not any(p is other for other in packed))


def _half_on_cuda(settings: Settings, policy: Policy) -> torch.dtype | None:
    """The precision in which the in-process engine samples, if it differs from that of the weights."""
    compute_dtype = products_dtype(settings.trainer.options.get("precision"), policy.model.dtype)
    return compute_dtype if policy.device.type == "cuda" and compute_dtype != policy.model.dtype else None


@dataclass(frozen=True)
class CacheNeed:
    """Bytes for keys and values."""

    least: int
    """With which rollouts can be written at all."""
    most: int
    """That all rollouts of a step can need at the same time."""


def _cache(settings: Settings, policy: Policy, longest_prompt: int, longest_answer: int) -> CacheNeed:
    """For the rollouts that are written at the same time."""
    if "rollout_workers" in settings.runtime.options:
        return CacheNeed(0, 0)
    has_share = "memory_share" in settings.engine.options or settings.engine_traits.outlives_run
    if has_share and policy.device.type == "cuda":
        return CacheNeed(0, 0)  # part of its share, or on a server's device
    dtype = _half_on_cuda(settings, policy) or policy.model.dtype
    per_token = cache_elements_per_token(policy.model) * dtype.itemsize
    if policy.device.type != "cuda":
        every = per_token * num_slots(settings) * (longest_prompt + longest_answer)
        return CacheNeed(every, every)

    def of(rollouts: int) -> int:
        """A group shares the pages of its prompt."""
        capacity = Capacity.fitting(
            per_token,
            policy.vocabulary,
            math.inf,
            rollouts=rollouts,
            group=settings.run.rollouts_per_prompt,
            concurrency=num_slots(settings),
            longest=(longest_prompt, max(1, longest_answer)),
            stops=len(policy.stop_ids) + 2 * len(settings.rollout.options.get("stop", ())),  # a text may have two ids
        )
        return capacity.cache_bytes(per_token, policy.vocabulary)

    every = settings.plan.prompts_per_window * settings.run.rollouts_per_prompt
    return CacheNeed(of(min(every, LEAST_BATCH)), of(every))


def num_slots(settings: Settings) -> int:
    """Rollouts that the in-process engine generates at the same time."""
    rollouts = settings.plan.prompts_ahead * settings.run.rollouts_per_prompt
    given = settings.engine.options.get("concurrency")
    return min(given, rollouts) if isinstance(given, int) and not settings.engine_traits.has_members else rollouts
