"""From `[engine]` to an engine, and a policy's weights into an engine where nothing is trained."""

import inspect
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from podium.model.device_thread import one_team
from podium.model.forward import products_dtype
from podium.model.handoff import publish, remove_published
from podium.model.load import Policy
from podium.settings.contracts import checked, user_code
from podium.settings.lookup import find, option_fields
from podium.settings.tables import Settings

LEAST_CONTEXT = 128
"""Smallest context that follows from the run: the probe and health checks must fit too."""


def cpu_team(settings: Settings) -> AbstractContextManager[None]:
    """One team of CPU threads for all work of a process. Has no effect with a GPU, where torch's CPU threads only load
    the model, and for an engine that divides the cores by itself."""
    is_on_cpu = settings.model.device == "cpu" or not torch.cuda.is_available()
    return one_team() if is_on_cpu and not settings.engine_traits.plans_threads else nullcontext()


def fitted(settings: Settings, longest_prompt: int) -> Settings:
    """The settings with a context that holds every prompt with its answer, if the engine has the option
    `max_context_tokens` and it is not set. vLLM reserves memory for its whole context, and a model's own context may be
    a hundred times what a run needs."""
    options, member = settings.engine.options, settings.engine_member
    has_context = "max_context_tokens" in option_fields(find("engine", member or settings.engine.name))
    if not has_context or settings.max_answer_tokens is None or settings.max_engine_tokens != sys.maxsize:
        return settings
    longest = longest_prompt + settings.max_answer_tokens
    needed = {"max_context_tokens": max(LEAST_CONTEXT, longest)}
    changes = {"member": {**options.get("member", {}), **needed}} if member else needed
    return settings.model_copy(update={"engine": settings.engine.model_copy(update=changes)})


def make_engine(
    settings: Settings,
    policy: Policy,
    *,
    snapshot: bool,
    on_event: Callable[..., None] | None = None,
    cache_bytes: int | None = None,
) -> Any:
    """`snapshot`: the engine keeps its weights while the trainer moves on. `on_event` receives the engine's events.
    `cache_bytes` is what the memory plan leaves for keys and values; None where nothing is trained on the same device.

    `compute_dtype`, `overlaps`, `in_flight`, `cache_bytes` and `on_event` go to a constructor that has a parameter of
    that name; `podium.stages.Engine` explains them.
    """
    make = find("engine", settings.engine.name)
    offered = {
        "compute_dtype": products_dtype(settings.trainer.options.get("precision"), policy.model.dtype),
        "overlaps": settings.run.max_lag > 0,
        "in_flight": settings.run.in_flight,
        "cache_bytes": cache_bytes,
        "on_event": on_event or (lambda kind, **details: None),
    }
    taken = inspect.signature(make).parameters
    wiring = {name: value for name, value in offered.items() if name in taken}
    with user_code("engine.name", settings.engine.name):
        return checked("engine", settings.engine.name, make(policy, snapshot, **wiring, **settings.engine.options))


async def hand_over(settings: Settings, engine: Any, policy: Policy, run_id: str) -> None:
    """Loads a policy's weights into an engine where nothing is trained: no sync channel, no probe."""
    if settings.sync.name == "shared":
        await engine.load_weights(policy.named_weights(), 0)
        return
    if engine.traits.outlives_run:
        await engine.claim(run_id, "run")
    with tempfile.TemporaryDirectory(prefix="podium-weights-") as own:
        root = settings.sync.options.get("root") or engine.traits.weights_root or own
        folder = publish(Path(root), policy, policy.named_weights(), 0)
        try:
            await engine.load_folder(folder, 0)
        finally:
            remove_published(folder)
