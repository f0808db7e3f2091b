"""From `[sync]` to the sync stage: between one trainer and one engine, with the probe that proves each push."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from podium.records import Prompt
from podium.settings.contracts import checked, user_code
from podium.settings.lookup import find
from podium.settings.tables import Settings
from podium.stages import Engine, Sync, Trainer
from podium.sync import Delivery, Noise

PROBE_PROMPTS = 4


def build_delivery(
    settings: Settings,
    trainer: Trainer,
    engine: Engine,
    policy: Any,
    first_prompts: Callable[[int], Iterable[Prompt]],
    folder: Path,
    run_id: str,
    kind: type[Delivery] = Delivery,
) -> Delivery:
    """From trainer to engine; `folder` is the run's, and `policy` may be one whose weights are elsewhere."""
    probe = probe_ids(settings, first_prompts)
    return kind(trainer, engine, policy, probe, rounding(settings, engine), folder, run_id)


def build_sync(settings: Settings, delivery: Delivery) -> Sync:
    with user_code("sync.name", settings.sync.name):
        made = find("sync", settings.sync.name)(delivery, **settings.sync.options)
    return checked("sync", settings.sync.name, made)


def probe_ids(settings: Settings, first_prompts: Callable[[int], Iterable[Prompt]]) -> list[int]:
    """Fixed tokens for the parity probe: the first prompts, one after the other, as many tokens as an engine takes."""
    longest = min(64, settings.max_engine_tokens - 1)
    ids = [token for prompt in first_prompts(PROBE_PROMPTS) for token in prompt.token_ids]
    return (ids * 2)[: max(2, min(longest, len(ids)))]


def rounding(settings: Settings, engine: Any) -> Noise:
    """How much rounding may change logprobs: that of the coarser of the two precisions of trainer and engine."""
    precisions = {settings.trainer.options.get("precision"), engine.traits.dtype}
    return Noise("bfloat16" if "bfloat16" in precisions else "float32")
