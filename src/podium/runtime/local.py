"""The runtime that keeps everything in one process: the stages are the objects themselves."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast

from podium.evaluation import HeldOut
from podium.ledger import Ledger
from podium.model.load import load_policy
from podium.report._fanout import Reports
from podium.run_folder import RunFolder
from podium.runtime._build import (
    Wired,
    build_advantages,
    build_data,
    build_filter,
    build_pack,
    build_reports,
    build_scoring,
    check_retirement,
    check_rewards,
    check_trainer,
    eval_options,
    make_trainer,
    read_sources,
    run_card,
)
from podium.runtime._engine import make_engine, make_rollout, make_sync
from podium.runtime._events import LoggedRollout, LoggedSync, LoggedTrainer
from podium.runtime._keep import build_checkpoint, check_space, check_start
from podium.runtime._memory import memory_plan
from podium.runtime._stop import stoppable
from podium.runtime._watch import Watch, WatchedRollout, watched
from podium.settings import Settings
from podium.stages import Stages, Trainer


def local(
    settings: Settings,
    folder: RunFolder,
    stop_requested: Callable[[], bool],
    step: int | None = None,
    console_mode: str | None = None,
) -> Wired:
    """Loads the model and wires the stages, writing nothing; `step` names the checkpoint to go on from."""
    check_rewards(settings)
    check_trainer(settings)
    check_start(settings)
    rows, held_out_rows = read_sources(settings.data), read_sources(settings.eval.data)
    policy = load_policy(settings.model, seed=settings.run.seed)
    data = build_data(settings, rows, policy, settings.plan)
    plan = replace(settings.plan, steps=data.num_steps)
    held_out = build_data(settings, held_out_rows, policy, plan) if held_out_rows else None
    scoring = build_scoring(settings, [data, *([held_out] if held_out else [])])
    check_retirement(settings, scoring, data)
    engine = make_engine(settings, policy, snapshot=plan.sync_every != 1)
    memory = memory_plan(settings, policy, max(data.lengths))
    check_space(settings, folder, memory)
    trainer = make_trainer(settings, policy, plan, memory)
    ledger, watch = Ledger(folder), Watch(folder, settings.run.max_stall_s)
    every_report = build_reports(settings, folder, ledger, console_mode)
    card = run_card(settings, folder, plan)
    reports = Reports(every_report, folder, ledger, card, settings.to_toml(), memory.max_tokens_per_batch)
    stages = Stages(
        data=data,
        rollout=LoggedRollout(
            make_rollout(settings, engine, policy, settings.rollout.options, plan.rollouts_per_prompt, "train"), folder
        ),
        reward=scoring,
        assign_advantages=build_advantages(settings),
        filter=build_filter(settings),
        pack=build_pack(settings, memory),
        trainer=cast(Trainer, LoggedTrainer(trainer, folder)),
        sync=LoggedSync(make_sync(settings, trainer, engine, policy, data, folder), engine, folder),
        checkpoint=build_checkpoint(settings, folder, policy, trainer, ledger, data, step),
        report=reports,
        evaluation=HeldOut(
            WatchedRollout(
                make_rollout(settings, engine, policy, eval_options(settings), settings.eval.n, "eval"), watch
            ),
            scoring.for_evaluation(),
            held_out.in_order() if held_out else [],
            lambda state: data.end(state) is not None,
            settings.eval.every,
            reports.evaluated,
        ),
        stop_requested=stop_requested,
    )
    return Wired(stoppable(watched(stages, watch)), engine, plan, reports, ledger, watch)
