"""The runtime that keeps everything in one process: the stages are the objects themselves."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from podium.model.load import load_policy
from podium.run_folder import RunFolder
from podium.runtime._build import (
    Wired,
    build_data,
    build_scoring,
    check_retirement,
    check_rewards,
    check_trainer,
    read_sources,
)
from podium.runtime._core import check_ranks, make_core
from podium.runtime._engine import TrainsAlone, fitted, make_delivery
from podium.runtime._keep import check_space, check_start, load_start
from podium.runtime._memory import memory_plan
from podium.runtime._ranks import join
from podium.runtime._reference import with_reference
from podium.runtime._reports import check_reports
from podium.runtime._stages import Parts, wire
from podium.settings import Settings


def local(
    settings: Settings,
    folder: RunFolder,
    stop_requested: Callable[[], bool],
    step: int | None = None,
    console_mode: str | None = None,
    *,
    ranks: Annotated[int, Field(ge=1, description="processes that train together, one a GPU, under torchrun")] = 1,
) -> Wired:
    """Loads the model and wires the stages, writing nothing; `step` names the checkpoint to go on from."""
    check_ranks(settings, ranks)
    check_rewards(settings)
    check_trainer(settings)
    check_start(settings)
    check_reports(settings)
    rows, held_out_rows = read_sources(settings.data), read_sources(settings.eval.data)
    policy = load_policy(settings.model, seed=settings.run.seed)
    data = build_data(settings, rows, policy, settings.plan)
    plan = replace(settings.plan, steps=data.num_steps)
    held_out = build_data(settings, held_out_rows, policy, plan) if held_out_rows else None
    scoring = build_scoring(settings, [data, *([held_out] if held_out else [])])
    check_retirement(settings, scoring, data)
    memory = memory_plan(settings, policy, max(data.lengths))
    check_space(settings, folder, memory, step)
    base_digest = policy.base_digest()
    longest = max(data.lengths + (held_out.lengths if held_out else []))
    trainer, engine = make_core(
        fitted(settings, longest), policy, plan, memory, join() if ranks > 1 else None, folder.event
    )
    stepping: Any = TrainsAlone(trainer, engine) if settings.engine.options.get("sleep") else trainer
    stepping, reference = with_reference(stepping, settings)
    parts = Parts(
        plan=plan,
        policy=policy,
        data=data,
        held_out=held_out,
        scoring=scoring,
        trainer=stepping,
        engine=engine,
        delivery=make_delivery(settings, trainer, engine, policy, data, folder),
        memory=memory,
        ranks=ranks,
        begin=partial(load_start, settings, policy, trainer),
        base_digest=base_digest,
        **({"end": reference.close} if reference is not None else {}),
    )
    return wire(settings, folder, parts, stop_requested, step, console_mode)
