"""All actors of a run: placed, started at the same time, prepared, and ended in reverse order.

All failures of a start are reported in one error. On a cluster at an address, rollout and reward workers outlive their
driver for a while: a driver that resumes the run finds them with their models loaded.
"""

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from podium.data.build import RunData, build_run_data
from podium.engine.build import fitted
from podium.errors import InputError
from podium.model.chat import tokenizer_fingerprint
from podium.model.load import load_reader
from podium.remote.pool import Rules
from podium.reward.build import ScoringRecipe, check_retirement, check_scoring, scoring_recipe
from podium.rollout.build import make_rollout_for
from podium.run.build import check_space
from podium.run.folder import RunFolder
from podium.runtime.on_ray import Cluster
from podium.runtime.on_ray.actors import ActorGroup, Call, Handle, all_of, results
from podium.runtime.on_ray.models import (
    RemotePolicy,
    RemoteReference,
    RemoteTrainer,
    RolloutWorker,
    RolloutWorkers,
    StoreDelivery,
)
from podium.runtime.on_ray.rewards import RewardActors, RewardWorker
from podium.runtime.wiring.memory import MemoryPlan
from podium.runtime.wiring.stages import Placed, read_rows
from podium.runtime.wiring.trainer import reference_needs, train_step
from podium.settings.tables import Settings
from podium.sync.build import build_delivery, build_sync

PING_S = 1.0


def place(settings: Settings, folder: RunFolder, step: int | None) -> Placed:
    """Starts the actors, and makes of them what the loop needs. At the end of the run they end in reverse order."""
    rows = read_rows(settings)
    reader = load_reader(settings.model)
    data = build_run_data(settings, *rows, reader)
    recipe = scoring_recipe(settings, data.sources)

    def on_event(kind: str, **details: Any) -> None:
        with suppress(OSError):  # a full disk is reported where a checkpoint is written
            folder.event(kind, **details)

    with ExitStack() as ends:
        actors = RunActors(fitted(settings, data.longest_prompt), folder.run_id, ends)
        returned = actors.start(reader.tokenizer)
        memory, base_digest = actors.prepare(data, recipe)
        rewards = RewardActors(actors.rewards, recipe, actors.rules, on_event)
        ends.callback(rewards.close)
        scoring = rewards.scoring
        check_scoring(scoring, data.sources)
        check_retirement(settings, scoring, data.train)
        check_space(settings, folder, memory, step)
        engine: Any = RolloutWorkers(settings, actors.rollouts, actors.rules, on_event)
        trainer: Any = actors.trainers.ready[0]
        reference: Any = actors.reference and actors.reference.ready[0]
        about = trainer.about
        policy = RemotePolicy(
            reader.tokenizer, tuple(about["stop_ids"]), about["max_context_tokens"], about["vocabulary"]
        )
        between = (trainer, engine, policy, data.train.in_order, folder.path, folder.run_id)

        def note_start(*_: Any) -> None:
            on_event("trainer_started", pid=about["pid"], node=about["node"], ranks=actors.trainers.count)
            if reference is not None:
                on_event("reference_started", **reference.about)
            if returned:
                on_event("reattached", **returned)

        return Placed(
            data=data,
            tokenizer=reader.tokenizer,
            scoring=scoring,
            rollout=partial(make_rollout_for, settings, engine, policy),
            engine=engine,
            trainer=trainer,
            train=partial(train_step, trainer, reference, None),
            sync=build_sync(settings, build_delivery(settings, *between, StoreDelivery)),
            memory=memory,
            base_digest=base_digest,
            begin=trainer.load_start,
            restored=note_start,
            end=ends.pop_all().close,
        )


class RunActors:
    """The actors by kind, each with its place; `ends` closes them, and the cluster after them."""

    def __init__(self, settings: Settings, run_id: str, ends: ExitStack) -> None:
        """Asks for all places at once, then waits for them."""
        options, needs = settings.runtime.options, reference_needs(settings)
        workers, ranks, cpus = options["rollout_workers"], options["ranks"], options["cpus_per_worker"]
        limits = {name: options[name] for name in ("max_restarts", "start_s", "recovery_s", "frozen_s")}
        self.rules = Rules(workers if isinstance(workers, tuple) else (workers, workers), floor=1, **limits)
        """Of both pools; `replicas` counts rollout workers."""
        num_actors = self.rules.replicas[1] + options["reward_workers"] + ranks + int(needs is not None)
        self._cluster = cluster = Cluster(options["address"], run_id, cpus * num_actors, options["linger_s"])
        ends.callback(cluster.close)
        has_gpus = float(settings.model.device != "cpu" and cluster.num_gpus > 0)
        per_rank, per_worker = options["gpus_per_rank"], options["gpus_per_rollout_worker"]
        if per_rank is None:
            per_rank = has_gpus
        if per_worker is None:
            per_worker = (settings.engine.options.get("tensor_parallel") or 1) * has_gpus
        # A user's code may be edited before the next driver comes.
        is_all_ours = not any(":" in reward.name for reward in settings.reward)
        self._engine_given, group = _engine_given(settings), partial(ActorGroup, cluster, cpus)
        self.trainers = group("trainer", RemoteTrainer, (settings, ranks), per_rank, ranks, False)
        self.rollouts = group("rollout", RolloutWorker, (self._engine_given,), per_worker, self.rules.replicas[0], True)
        self.rewards = group("reward", RewardWorker, (), 0.0, options["reward_workers"], is_all_ours)
        self.reference: ActorGroup | None = None
        if needs is not None:
            gpus = 0.0 if needs[0]["device"] == "cpu" else per_rank or 1.0
            self.reference = group("reference", RemoteReference, needs, gpus, 1, False)
        every = (self.trainers, self.rollouts, self.rewards, self.reference)
        self._kinds = [kind for kind in every if kind is not None]
        for kind in self._kinds:
            ends.callback(kind.close)
        if not cluster.is_own:
            over = threading.Event()
            ends.callback(over.set)
            threading.Thread(target=_ping, args=(self._kinds[1:], over), daemon=True).start()
        waits = {kind.name: partial(cluster.wait_for, kind.places, self.rules.start_s) for kind in self._kinds}
        all_of(waits, "kinds of workers have no place")

    def start(self, tokenizer: Any) -> dict[str, int]:
        """Starts every actor and waits for all of them. Returns how many workers a former driver had left, by kind."""
        returned: dict[str, int] = {}
        if not self._cluster.is_own:
            self.rollouts.adopt(self._engine_given)
            self.rewards.adopt(None)
            returned = {kind.name: len(kind.ready) for kind in self._kinds if kind.ready}
        calls, starting, meet_at = dict[str, Call](), dict[str, tuple[ActorGroup, Handle]](), None
        for kind in self._kinds:
            for n in range(1 + len(kind.ready), 1 + kind.count):
                name, actor = f"{kind.name}-{n}", kind.start(n)
                if kind is self.trainers and kind.count > 1:
                    meet_at = meet_at or actor.call("meeting_place")  # of rank 0
                starting[name] = kind, actor
                calls[name] = actor.call("start", *([n - 1, meet_at] if kind is self.trainers else []))
        for name, about in results(calls, self.rules.start_s).items():
            kind, actor = starting[name]
            actor.note(about)
            kind.ready.append(actor)
        _check_tokenizers(tokenizer, self.trainers, self.rollouts)
        return returned

    def prepare(self, data: RunData, recipe: ScoringRecipe) -> tuple[MemoryPlan, str | None]:
        """Hands over what depends on the data: the number of steps, the longest prompt, the rewards that rows name.
        Returns the trainer's memory plan and the digest of its base weights."""
        sizes = data.plan.steps, max(data.train.lengths)
        calls = {f"trainer-{n}": actor.call("prepare", *sizes) for n, actor in enumerate(self.trainers.ready, 1)}
        calls |= {f"reward-{n}": actor.call("prepare", recipe) for n, actor in enumerate(self.rewards.ready, 1)}
        found = results(calls, self.rules.start_s)["trainer-1"]
        for actor in self.trainers.ready[1:]:
            actor.call("follow")
        return found


def _ping(kinds: Sequence[ActorGroup], over: threading.Event) -> None:
    """Workers end when no driver pings them, and a pool pings only those that it has taken."""
    while not over.wait(PING_S):
        for actor in [actor for kind in kinds for actor in kind.started if not actor.is_over]:
            with suppress(Exception):  # a dead worker is noticed by the next call to it
                actor.call("ping")


def _engine_given(settings: Settings) -> dict[str, Any]:
    """What `load_engine` is given (server/serve.py), and whether weights may change while rollouts are written."""
    engine, precision = settings.engine, settings.trainer.options.get("precision")
    options = engine.model_dump(mode="json")
    return {
        "model": settings.model.model_dump(mode="json"),
        "engine": engine.name,
        "options": {key: value for key, value in options.items() if key in engine.options},
        "compute_dtype": precision if precision == "bfloat16" else None,
        "in_flight": settings.run.in_flight,
    }


def _check_tokenizers(tokenizer: Any, *kinds: ActorGroup) -> None:
    """Refuses tokenizers that differ between machines: the same ids would mean other texts."""
    here = tokenizer_fingerprint(tokenizer)
    each = [(f"{kind.name}-{n}", actor.about) for kind in kinds for n, actor in enumerate(kind.ready, 1)]
    other = [name for name, about in each if about["tokenizer"] != here]
    if other:
        raise InputError(
            f"model.name: {', '.join(other)} found another tokenizer than the driver under that name; put the same "
            "model on every machine"
        )
