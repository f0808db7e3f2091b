"""From the parts that a runtime made to the stages that the loop is handed: the same for every runtime."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from podium.contracts import checked, user_code
from podium.data._order import OrderedData
from podium.data._table import left_out
from podium.evaluation import HeldOut
from podium.ledger import Ledger
from podium.lookup import find
from podium.records import Plan
from podium.report._card import run_card
from podium.report._fanout import Reports
from podium.report._pieces import Pieces, piece_decoder
from podium.reward._scoring import Scoring
from podium.run_folder import RunFolder
from podium.runtime._build import Wired, build_advantages, build_filter, build_pack, eval_options
from podium.runtime._engine import make_rollout
from podium.runtime._events import LoggedRollout, LoggedSync, LoggedTrainer
from podium.runtime._keep import build_checkpoint
from podium.runtime._memory import MemoryPlan
from podium.runtime._reports import build_reports
from podium.runtime._stop import stoppable
from podium.runtime._watch import Watch, watched
from podium.settings import Settings
from podium.stages import Stages, Sync, Trainer
from podium.sync._delivery import Delivery


@dataclass(frozen=True)
class Parts:
    """What differs from runtime to runtime, ready to be wired."""

    plan: Plan
    policy: Any
    """Of it the tokenizer, the stop ids and the vocabulary are needed here; the weights may be elsewhere."""
    data: OrderedData
    held_out: OrderedData | None
    scoring: Scoring
    trainer: Any
    engine: Any
    delivery: Delivery
    memory: MemoryPlan
    ranks: int
    begin: Callable[[], None]
    """Gives the trainer the weights that a new run starts from."""
    base_digest: str | None
    """Of the weights under the adapter, taken before they were spread over ranks; None for full weights."""
    end: Callable[[], None] = lambda: None
    """Ends what the runtime itself started."""


def wire(
    settings: Settings,
    folder: RunFolder,
    parts: Parts,
    stop_requested: Callable[[], bool],
    step: int | None,
    console_mode: str | None,
) -> Wired:
    """Writes nothing; `step` names the checkpoint to go on from."""
    plan, data, engine, policy = parts.plan, parts.data, parts.engine, parts.policy
    held_out, scoring = parts.held_out, parts.scoring
    ledger, watch = Ledger(folder), Watch(folder, settings.run.max_stall_s)
    pieces = Pieces(folder.tokens, piece_decoder(policy.tokenizer))
    every_report = build_reports(settings, folder, ledger, console_mode, pieces)
    card = run_card(settings.to_dict(), folder.path, plan.steps)
    notes = [*left_out(data, "data"), *(left_out(held_out, "eval.data") if held_out else ())]
    tokens = parts.memory.max_tokens_per_batch
    reports = Reports(every_report, folder, ledger, card, settings.to_toml(), tokens, notes)
    with user_code("sync.name", settings.sync.name):
        made = find("sync", settings.sync.name)(parts.delivery, **settings.sync.options)
    sync = checked("sync", settings.sync.name, made)
    stages = Stages(
        data=data,
        rollout=LoggedRollout(
            make_rollout(settings, engine, policy, settings.rollout.options, plan.rollouts_per_prompt, "train"), folder
        ),
        reward=scoring,
        assign_advantages=build_advantages(settings),
        filter=build_filter(settings),
        pack=build_pack(settings, parts.memory, parts.ranks),
        trainer=cast(Trainer, LoggedTrainer(parts.trainer, folder)),
        sync=cast(Sync, LoggedSync(sync, engine, folder)),
        checkpoint=build_checkpoint(
            settings, folder, parts.delivery.trainer, ledger, data, step, parts.begin, parts.base_digest
        ),
        report=reports,
        evaluation=evaluation(
            settings,
            make_rollout(settings, engine, policy, eval_options(settings), settings.eval.n, "eval"),
            scoring.for_evaluation(),
            data,
            held_out,
            reports,
            watch,
        ),
        stop_requested=stop_requested,
        event=folder.event,
    )
    return Wired(stoppable(watched(stages, watch), plan), engine, plan, reports, ledger, watch, parts.end)


def evaluation(
    settings: Settings,
    rollout: Any,
    scoring: Scoring,
    data: OrderedData,
    held_out: OrderedData | None,
    reports: Reports,
    watch: Watch,
) -> HeldOut:
    """Held-out prompts, every so often and when the data has ended."""
    return HeldOut(
        rollout,
        scoring,
        held_out.in_order() if held_out else [],
        lambda state: data.end(state) is not None,
        settings.eval.every,
        reports.evaluated,
        settings.eval.ks,
        held_out.tables if held_out else None,
        watch.at,
    )
