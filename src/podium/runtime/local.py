"""Everything in one process: builds the stages from the settings and runs the loop over them.

`train`, `resume` and `evaluate` are what the command line and `import podium` offer.
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from podium.advantage._assign import assign_advantages
from podium.checkpoint import FolderCheckpoint
from podium.data._order import OrderedData
from podium.errors import InputError, PodiumError
from podium.evaluate import HeldOut, eval_metrics, held_out_groups
from podium.filter import filter_groups
from podium.ledger import Ledger
from podium.loop import train as run_loop
from podium.lookup import find
from podium.model.load import Policy, load_policy
from podium.pack import pack
from podium.records import Group, Plan, RunState
from podium.report._fanout import Reports
from podium.report.console import to_terminal
from podium.report.jsonl import Jsonl
from podium.run_folder import RunFolder
from podium.runtime._build import build_data, build_scoring, run_card
from podium.runtime._signals import StopSignal
from podium.settings import Choice, Settings
from podium.stages import Engine, Stages
from podium.sync._probe import TOLERANCE


@dataclass(frozen=True)
class Summary:
    """How a run ended."""

    state: str
    """"finished" or "stopped"."""
    step: int
    steps: int
    seconds: float
    """From the first step's start to the end, evaluations included."""
    accuracy_before: float | None
    accuracy_after: float | None
    skipped_steps: int
    folder: str
    page: str
    model: str | None
    """Folder of the trained model, once finished."""
    exit_code: int = 0


@dataclass(frozen=True)
class Local:
    """A wired run."""

    stages: Stages
    plan: Plan
    reports: Reports
    ledger: Ledger


def local(settings: Settings, folder: RunFolder, stop_requested: Callable[[], bool], step: int | None = None) -> Local:
    """Loads the model and wires the stages; `step` names the checkpoint to go on from."""
    policy = load_policy(settings.model, seed=settings.run.seed)
    data = build_data(settings, settings.data, policy.tokenizer, policy.max_context_tokens, settings.plan)
    plan = replace(settings.plan, steps=data.num_steps)
    held_out = _held_out_data(settings, policy, plan)
    scoring = build_scoring(settings, [data, *([held_out] if held_out else [])])
    engine = make_engine(settings, policy, snapshot=plan.sync_every != 1)
    loss = partial(find("loss", settings.loss.name), **settings.loss.options)
    trainer = find("trainer", settings.trainer.name)(policy, loss, **settings.trainer.options)
    tolerance = TOLERANCE[settings.model.dtype]
    sync = find("sync", settings.sync.name)(trainer, engine, probe_ids(data), tolerance, **settings.sync.options)
    ledger = Ledger(folder)
    card = run_card(settings, str(folder.path), plan)
    reports = Reports([Jsonl(ledger), *_reports(settings.report, folder)], folder, ledger, card)
    checkpoint = FolderCheckpoint(
        folder,
        trainer,
        ledger,
        data.fingerprint,
        every=settings.checkpoint.every,
        keep=settings.checkpoint.keep,
        step=step,
        warn=to_terminal,
    )
    held_out_prompts = held_out.in_order() if held_out else []
    evaluation = HeldOut(
        _eval_rollout(settings, engine, policy),
        scoring,
        held_out_prompts,
        plan,
        settings.eval.every,
        reports.evaluated,
    )
    stages = Stages(
        data=data,
        rollout=make_rollout(settings, engine, policy, settings.rollout.options, plan.rollouts_per_prompt, "train"),
        reward=scoring,
        assign_advantages=partial(
            assign_advantages, function=partial(find("advantage", settings.advantage.name), **settings.advantage.options)
        ),
        filter=partial(filter_groups, drop_no_signal=settings.filter.drop_no_signal),
        pack=partial(
            pack,
            max_tokens_per_batch=settings.pack.max_tokens_per_batch,
            temperature=settings.rollout.options.get("temperature", 1.0),
            device=policy.device,
        ),
        trainer=trainer,
        sync=sync,
        checkpoint=checkpoint,
        report=reports,
        evaluation=evaluation,
        stop_requested=stop_requested,
    )
    return Local(stages, plan, reports, ledger)


def train(settings: Settings) -> Summary:
    """A new run. Nothing is written before the model, the data and the rewards are known to be good."""
    path = settings.run.folder or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.run.name}"
    folder = RunFolder.create(path)
    return _run(settings.model_copy(update={"run": settings.run.model_copy(update={"folder": path})}), folder)


def resume(settings: Settings, folder: RunFolder, step: int | None = None) -> Summary:
    """Goes on with a run from its newest checkpoint, or from the one named; `settings` are the run's own, perhaps
    with more steps."""
    folder.lock()
    return _run(settings, folder, step, resumes=True)


def evaluate(
    settings: Settings, weights: Path | None = None, samples: Callable[[list[Group]], None] | None = None
) -> dict[str, float]:
    """Held-out metrics of `[model]`, or of trained `weights` (a model folder or an adapter folder)."""
    if not settings.eval.data:
        raise InputError("nothing to evaluate on: add an [[eval.data]] table")
    policy = load_policy(settings.model, seed=settings.run.seed, weights=weights)
    held_out = _held_out_data(settings, policy, settings.plan)
    assert held_out is not None
    scoring = build_scoring(settings, [held_out])
    engine = make_engine(settings, policy, snapshot=False)
    rollout = _eval_rollout(settings, engine, policy)

    async def run() -> list[Group]:
        await engine.load_weights(policy.named_weights(), 0)
        return await held_out_groups(rollout, scoring, held_out.in_order())

    groups = asyncio.run(run())
    if samples is not None:
        samples(groups)
    return eval_metrics(groups)


def _run(settings: Settings, folder: RunFolder, step: int | None = None, resumes: bool = False) -> Summary:
    created_empty = not resumes
    try:
        with StopSignal() as stop:
            wired = local(settings, folder, stop.requested, step)
            folder.settings.write_text(settings.to_toml(), encoding="utf-8")
            created_empty = False
            folder.event("started", resumes=resumes)
            return asyncio.run(_loop(settings, folder, wired, stop))
    except BaseException as error:
        if created_empty:
            _undo_creation(folder)
        else:
            folder.event("failed", error=type(error).__name__, message=str(error))
            message = str(error) if isinstance(error, PodiumError) else f"{type(error).__name__}: {error}"
            folder.write_status("failed", 0, 1, message)
        raise
    finally:
        folder.unlock()


async def _loop(settings: Settings, folder: RunFolder, wired: Local, stop: StopSignal) -> Summary:
    started = time.monotonic()
    state = await run_loop(wired.stages, wired.plan)
    summary = _summary(state, wired, folder, stop, time.monotonic() - started)
    folder.write_status(summary.state, state.step, wired.plan.steps)
    folder.event(summary.state, step=state.step)
    wired.reports.finish(asdict(summary))
    return summary


def _summary(state: RunState, wired: Local, folder: RunFolder, stop: StopSignal, seconds: float) -> Summary:
    accuracies = [line["eval/accuracy"] for line in wired.ledger.history() if "eval/accuracy" in line]
    is_finished = state.step >= wired.plan.steps
    return Summary(
        state="finished" if is_finished else "stopped",
        step=state.step,
        steps=wired.plan.steps,
        seconds=seconds,
        accuracy_before=accuracies[0] if accuracies else None,
        accuracy_after=accuracies[-1] if accuracies else None,
        skipped_steps=state.num_skipped_steps,
        folder=str(folder.path),
        page=str(folder.page),
        model=str(folder.final) if is_finished else None,
        exit_code=0 if is_finished else 128 + (stop.number or 0),
    )


def probe_ids(data: OrderedData) -> list[int]:
    """Fixed tokens for the parity probe: the first prompts, one after the other."""
    ids = [token for prompt in data.in_order(4) for token in prompt.token_ids]
    return (ids * 2)[: max(2, min(64, len(ids)))]


def make_engine(settings: Settings, policy: Policy, *, snapshot: bool) -> Any:
    """`snapshot`: the engine keeps its weights while the trainer moves on."""
    return find("engine", settings.engine.name)(policy, snapshot, **settings.engine.options)


def make_rollout(
    settings: Settings, engine: Engine, policy: Policy, options: dict[str, Any], rollouts_per_prompt: int, purpose: str
) -> Any:
    make = find("rollout", settings.rollout.name)
    seed = settings.run.seed
    return make(engine, policy.tokenizer, policy.stop_ids, rollouts_per_prompt, seed, purpose, **options)


def _eval_rollout(settings: Settings, engine: Engine, policy: Policy) -> Any:
    """The same rollout with `[eval]`'s sampling."""
    own = {"temperature": settings.eval.temperature, "top_k": settings.eval.top_k, "top_p": settings.eval.top_p}
    return make_rollout(settings, engine, policy, settings.rollout.options | own, settings.eval.n, "eval")


def _held_out_data(settings: Settings, policy: Policy, plan: Plan) -> OrderedData | None:
    if not settings.eval.data:
        return None
    return build_data(settings, settings.eval.data, policy.tokenizer, policy.max_context_tokens, plan)


def _reports(given: Sequence[Choice], folder: RunFolder) -> list[Any]:
    """Each report gets the folder if it asks for it; jsonl is always there already."""
    made = []
    for choice in given:
        if choice.name != "jsonl":
            make = find("report", choice.name)
            wants_folder = "folder" in inspect.signature(make).parameters
            made.append(make(*([folder] if wants_folder else []), **choice.options))
    return made


def _undo_creation(folder: RunFolder) -> None:
    """A run that was refused leaves no folder behind."""
    with contextlib.suppress(OSError):
        (folder.path / "lock").unlink()
        folder.path.rmdir()
