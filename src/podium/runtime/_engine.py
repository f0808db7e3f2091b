"""From settings to an engine, what asks it and what feeds it."""

import inspect
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from podium.contracts import checked, is_users, user_code
from podium.data._order import OrderedData
from podium.lookup import find
from podium.model.device_thread import one_team
from podium.model.handoff import publish, remove_published
from podium.model.load import Policy
from podium.records import Batch, UpdateResult
from podium.run_folder import RunFolder
from podium.runtime._around import Around
from podium.runtime._users import Bounds, UsersRollout
from podium.settings import Settings
from podium.stages import Engine
from podium.sync._delivery import Delivery
from podium.sync._probe import Noise


def cpu_team(settings: Settings) -> AbstractContextManager[None]:
    """Around all that a process does for a run. Nothing with a GPU, where torch's CPU threads only load the model; nor
    for vLLM in this process, which shares out the cores itself."""
    is_on_cpu = settings.model.device == "cpu" or not torch.cuda.is_available()
    return one_team() if is_on_cpu and settings.engine.name != "vllm_local" else nullcontext()


LEAST_CONTEXT = 128
"""Of a vLLM whose context follows from the run: the probe and health checks fit too."""


def fitted(settings: Settings, longest_prompt: int) -> Settings:
    """The settings with a context for vLLM that holds every prompt with its answer, where none is given.

    vLLM plans memory for its whole context; a model's own may be a hundred times as long as what a run asks for.
    """
    options = settings.engine.options
    is_pool = settings.engine.name == "pool" and options.get("of") == "vllm_local"
    is_vllm = settings.engine.name == "vllm_local" or is_pool
    if not is_vllm or settings.rollout.name != "single_turn" or max_engine_tokens(settings) != sys.maxsize:
        return settings
    needed = {
        "max_context_tokens": max(LEAST_CONTEXT, longest_prompt + settings.rollout.options.get("max_new_tokens", 256))
    }
    changes = {"member": {**options.get("member", {}), **needed}} if is_pool else needed
    return settings.model_copy(update={"engine": settings.engine.model_copy(update=changes)})


def make_engine(
    settings: Settings, policy: Policy, *, snapshot: bool, on_event: Callable[..., None] | None = None
) -> Any:
    """`snapshot`: the engine keeps its weights while the trainer moves on. `on_event` is told what happens to it.

    An engine with an argument called `compute_dtype` is handed that of the trainer's matrix products, one with
    `overlaps` whether it may write while the trainer steps.
    """
    make = find("engine", settings.engine.name)
    wiring: tuple[Any, ...] = (policy, snapshot)
    takes = inspect.signature(make).parameters
    if "compute_dtype" in takes:
        precision = settings.trainer.options.get("precision", "float32")
        wiring += (None if precision == "float32" else getattr(torch, precision),)
    if "overlaps" in takes:
        wiring += (settings.run.max_lag > 0,)
    with user_code("engine.name", settings.engine.name):
        engine = checked("engine", settings.engine.name, make(*wiring, **settings.engine.options))
    if hasattr(engine, "in_flight"):
        engine.in_flight = settings.run.in_flight
    if on_event is not None and hasattr(engine, "on_event"):
        engine.on_event = on_event
    return engine


def make_rollout(
    settings: Settings, engine: Engine, policy: Any, options: dict[str, Any], rollouts_per_prompt: int, purpose: str
) -> Any:
    """`purpose` keeps the seeds of training, evaluation and checks apart."""
    make, seed = find("rollout", settings.rollout.name), settings.run.seed
    wiring = (engine, policy.tokenizer, policy.stop_ids, policy.vocabulary, rollouts_per_prompt, seed, purpose)
    name = settings.rollout.name
    with user_code("rollout.name", name):
        stage = checked("rollout", name, make(*wiring, **options))
    if not is_users(name):
        return stage

    def newest_version() -> int | None:  # weights that change in flight may write before the engine says so
        return None if settings.run.in_flight else getattr(engine, "policy_version", None)

    return UsersRollout(stage, name, Bounds(policy.vocabulary, policy.max_context_tokens, newest_version))


def make_delivery(
    settings: Settings,
    trainer: Any,
    engine: Any,
    policy: Any,
    data: OrderedData,
    folder: RunFolder,
    kind: type[Delivery] = Delivery,
) -> Delivery:
    """From trainer to engine, with the probe that proves each push."""
    probe, noise = probe_ids(settings, data), Noise(coarsest_precision(settings, engine))
    return kind(trainer, engine, policy, probe, noise, folder.path, folder.run_id)


class TrainsAlone(Around):
    """A trainer whose engine sleeps while it steps (`engine.sleep`)."""

    def __init__(self, trainer: Any, engine: Any) -> None:
        super().__init__(trainer)
        self._engine = engine

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        await self._engine.sleep()
        try:
            return await self._stage.step(batches)
        finally:
            await self._engine.wake()


async def hand_over(settings: Settings, engine: Any, policy: Policy, run_id: str) -> None:
    """A policy's weights into an engine where nothing is trained: no channel, no probe."""
    if settings.sync.name == "shared":
        await engine.load_weights(policy.named_weights(), 0)
        return
    if getattr(engine, "outlives_run", False):
        await engine.claim(run_id, "run")
    with tempfile.TemporaryDirectory(prefix="podium-weights-") as own:
        root = settings.sync.options.get("root") or getattr(engine, "weights_root", None) or own
        folder = publish(Path(root), policy, policy.named_weights(), 0)
        try:
            await engine.load_folder(folder, 0)
        finally:
            remove_published(folder)


def max_engine_tokens(settings: Settings) -> int:
    """Prompt and answer that the engine takes by its own options; those of a pool's members stand in `member`."""
    options = settings.engine.options
    return (options | options.get("member", {})).get("max_context_tokens") or sys.maxsize


def probe_ids(settings: Settings, data: OrderedData) -> list[int]:
    """Fixed tokens for the parity probe: the first prompts, one after the other, as many as an engine takes."""
    longest = min(64, max_engine_tokens(settings) - 1)
    ids = [token for prompt in data.in_order(4) for token in prompt.token_ids]
    return (ids * 2)[: max(2, min(longest, len(ids)))]


def coarsest_precision(settings: Settings, engine: Any) -> str:
    """In which one of the two sides computes: what rounding may do to logprobs follows from it."""
    precisions = {settings.trainer.options.get("precision", "float32"), getattr(engine, "dtype", "float32")}
    return "bfloat16" if "bfloat16" in precisions else "float32"
