"""The runtime that keeps everything in one process: the stages are the objects themselves."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, cast

from pydantic import Field

from podium.evaluation import HeldOut
from podium.ledger import Ledger
from podium.model.load import load_policy
from podium.report._card import run_card
from podium.report._fanout import Reports
from podium.report._pieces import Pieces, piece_decoder
from podium.run_folder import RunFolder
from podium.runtime._build import (
    Wired,
    build_advantages,
    build_data,
    build_filter,
    build_pack,
    build_scoring,
    check_retirement,
    check_rewards,
    check_trainer,
    eval_options,
    read_sources,
)
from podium.runtime._core import check_ranks, make_core
from podium.runtime._engine import TrainsAlone, make_rollout, make_sync
from podium.runtime._events import LoggedRollout, LoggedSync, LoggedTrainer
from podium.runtime._keep import build_checkpoint, check_space, check_start
from podium.runtime._memory import memory_plan
from podium.runtime._ranks import join
from podium.runtime._reference import with_reference
from podium.runtime._reports import build_reports, check_reports
from podium.runtime._stop import stoppable
from podium.runtime._watch import Watch, watched
from podium.settings import Settings
from podium.stages import Stages, Sync, Trainer


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
    check_space(settings, folder, memory)
    trainer, engine = make_core(settings, policy, plan, memory, join() if ranks > 1 else None, folder.event)
    stepping: Any = TrainsAlone(trainer, engine) if settings.engine.options.get("sleep") else trainer
    stepping, reference = with_reference(stepping, settings)
    ledger, watch = Ledger(folder), Watch(folder, settings.run.max_stall_s)
    pieces = Pieces(folder.tokens, piece_decoder(policy.tokenizer))
    every_report = build_reports(settings, folder, ledger, console_mode, pieces)
    card = run_card(settings.to_dict(), folder.path, plan.steps)
    reports = Reports(every_report, folder, ledger, card, settings.to_toml(), memory.max_tokens_per_batch)
    stages = Stages(
        data=data,
        rollout=LoggedRollout(
            make_rollout(settings, engine, policy, settings.rollout.options, plan.rollouts_per_prompt, "train"), folder
        ),
        reward=scoring,
        assign_advantages=build_advantages(settings),
        filter=build_filter(settings),
        pack=build_pack(settings, memory, ranks),
        trainer=cast(Trainer, LoggedTrainer(stepping, folder)),
        sync=cast(Sync, LoggedSync(make_sync(settings, trainer, engine, policy, data, folder), engine, folder)),
        checkpoint=build_checkpoint(settings, folder, policy, trainer, ledger, data, step),
        report=reports,
        evaluation=HeldOut(
            make_rollout(settings, engine, policy, eval_options(settings), settings.eval.n, "eval"),
            scoring.for_evaluation(),
            held_out.in_order() if held_out else [],
            lambda state: data.end(state) is not None,
            settings.eval.every,
            reports.evaluated,
            settings.eval.ks,
            held_out.tables if held_out else None,
            watch.at,
        ),
        stop_requested=stop_requested,
        event=folder.event,
    )
    return Wired(stoppable(watched(stages, watch), plan), engine, plan, reports, ledger, watch, reference)
