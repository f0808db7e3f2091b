"""All actors of a run: placed, started at the same time, prepared, and ended in reverse order.

All failures of a start are reported in one error. On a cluster at an address, rollout and reward workers outlive their
driver for a while: a driver that resumes the run finds them with their models loaded.
"""

import threading
from collections.abc import Mapping
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
    """Starts the actors, and makes of them what the loop needs."""
    rows = read_rows(settings)
    reader = load_reader(settings.model)
    data = build_run_data(settings, *rows, reader)
    recipe = scoring_recipe(settings, data.sources)
    actors = RunActors(fitted(settings, data.longest_prompt), folder)
    try:
        policy = actors.start(reader.tokenizer)
        memory, base_digest = actors.prepare(data, recipe)
        trainer, engine = actors.trainer, actors.engine
        scoring = actors.rewards.scoring
        check_scoring(scoring, data.sources)
        check_retirement(settings, scoring, data.train)
        check_space(settings, folder, memory, step)
        between = (trainer, engine, policy, data.train.in_order, folder.path, folder.run_id)
        return Placed(
            data=data,
            tokenizer=policy.tokenizer,
            scoring=scoring,
            rollout=partial(make_rollout_for, settings, engine, policy),
            engine=engine,
            trainer=trainer,
            train=partial(train_step, trainer, actors.reference, None),
            sync=build_sync(settings, build_delivery(settings, *between, StoreDelivery)),
            memory=memory,
            base_digest=base_digest,
            begin=trainer.load_start,
            restored=actors.note_start,
            end=actors.close,
        )
    except BaseException:
        actors.close()
        raise


class RunActors:
    """After `start` and `prepare`, `trainer`, `reference`, `engine` and `rewards` are what the loop needs."""

    trainer: Any
    """A `RemoteTrainer`."""
    reference: Any = None
    """A `RemoteReference`, if the run has a reference of its own."""
    engine: Any
    """`RolloutWorkers`."""
    rewards: RewardActors

    def __init__(self, settings: Settings, folder: RunFolder) -> None:
        self._settings, self._folder, self._options = settings, folder, settings.runtime.options
        options, workers = self._options, self._options["rollout_workers"]
        limits = {name: options[name] for name in ("max_restarts", "start_s", "recovery_s", "frozen_s")}
        replicas = workers if isinstance(workers, tuple) else (workers, workers)
        self._rules = Rules(replicas, floor=1, **limits)
        """Of both pools; `replicas` counts rollout workers."""
        self._reference = reference_needs(settings)
        num_actors = replicas[1] + options["reward_workers"] + options["ranks"] + int(self._reference is not None)
        num_cpus = options["cpus_per_worker"] * num_actors
        self._cluster = Cluster(options["address"], folder.run_id, num_cpus, options["linger_s"])
        self._ends = ExitStack()
        self._ends.callback(self._cluster.close)
        self._started: dict[str, Mapping[str, Any]] = {}
        """Events of the start, which are written when the run begins."""
        self._over = threading.Event()

    def start(self, tokenizer: Any) -> RemotePolicy:
        """Starts every actor and waits for all of them; returns what is then known of the policy."""
        given = self._engine_given()
        self._reserve(given)
        trainers, rollouts, rewards, *references = self._kinds
        if not self._cluster.is_own:
            rollouts.adopt(given)
            rewards.adopt(None)
            if returned := {kind.name: len(kind.ready) for kind in (rollouts, rewards) if kind.ready}:
                self._started["reattached"] = returned
        starting: dict[str, tuple[ActorGroup, Handle]] = {}
        calls, meet_at = dict[str, Call](), None
        for kind in self._kinds:
            for n in range(1 + len(kind.ready), 1 + kind.count):
                name, actor = f"{kind.name}-{n}", kind.start(n)
                if kind is trainers and kind.count > 1:
                    meet_at = meet_at or actor.call("meeting_place")  # of rank 0
                starting[name] = kind, actor
                calls[name] = actor.call("start", *([n - 1, meet_at] if kind is trainers else []))
        for name, about in results(calls, self._rules.start_s).items():
            kind, actor = starting[name]
            actor.note(about)
            kind.ready.append(actor)
        _check_tokenizers(tokenizer, trainers, rollouts)
        self.trainer = trainers.ready[0]
        about = self.trainer.about
        self._started["trainer_started"] = {"pid": about["pid"], "node": about["node"], "ranks": trainers.count}
        if references:
            [self.reference] = references[0].ready
            self._started["reference_started"] = self.reference.about
        self.engine = RolloutWorkers(self._settings, rollouts, self._rules, self._event)
        return RemotePolicy(tokenizer, tuple(about["stop_ids"]), about["max_context_tokens"], about["vocabulary"])

    def prepare(self, data: RunData, recipe: ScoringRecipe) -> tuple[MemoryPlan, str | None]:
        """Hands over what depends on the data: the number of steps, the longest prompt, the rewards that rows name.
        Returns the trainer's memory plan and the digest of its base weights."""
        trainers, _, rewards, *_ = self._kinds
        sizes = data.plan.steps, max(data.train.lengths)
        calls = {f"trainer-{n}": actor.call("prepare", *sizes) for n, actor in enumerate(trainers.started, 1)}
        calls |= {f"reward-{n}": actor.call("prepare", recipe) for n, actor in enumerate(rewards.ready, 1)}
        found = results(calls, self._rules.start_s)["trainer-1"]
        for actor in trainers.started[1:]:
            actor.call("follow")
        self.rewards = RewardActors(rewards, recipe, self._rules, self._event)
        self._ends.callback(self.rewards.close)
        return found

    def note_start(self, *_: Any) -> None:
        """Writes the events of the start."""
        for event, details in self._started.items():
            self._event(event, **details)

    def close(self) -> None:
        """Ends the workers, their places and the cluster, in reverse order of their start."""
        self._over.set()
        self._ends.close()

    def _reserve(self, engine_given: Mapping[str, Any]) -> None:
        """Asks for all places at once, then waits for them."""
        settings, options, needs = self._settings, self._options, self._reference
        has_gpus = float(settings.model.device != "cpu" and self._cluster.num_gpus > 0)
        per_rank, per_worker = options["gpus_per_rank"], options["gpus_per_rollout_worker"]
        if per_rank is None:
            per_rank = has_gpus
        if per_worker is None:
            per_worker = (settings.engine.options.get("tensor_parallel") or 1) * has_gpus
        # A user's code may be edited before the next driver comes.
        is_all_ours = not any(":" in reward.name for reward in settings.reward)
        group, ranks = partial(ActorGroup, self._cluster, options["cpus_per_worker"]), options["ranks"]
        self._kinds = [
            group("trainer", RemoteTrainer, (settings, ranks), per_rank, ranks, False),
            group("rollout", RolloutWorker, (engine_given,), per_worker, self._rules.replicas[0], True),
            group("reward", RewardWorker, (), 0.0, options["reward_workers"], is_all_ours),
        ]
        if needs is not None:
            gpus = 0.0 if needs[0]["device"] == "cpu" else per_rank or 1.0
            self._kinds.append(group("reference", RemoteReference, needs, gpus, 1, False))
        for kind in self._kinds:
            self._ends.callback(kind.close)
        if not self._cluster.is_own:
            threading.Thread(target=self._ping, daemon=True).start()
        waits = {kind.name: partial(self._cluster.wait_for, kind.places, self._rules.start_s) for kind in self._kinds}
        all_of(waits, "kinds of workers have no place")

    def _ping(self) -> None:
        """Workers end when no driver pings them, and a pool pings only those that it has taken."""
        while not self._over.wait(PING_S):
            for actor in [actor for kind in self._kinds[1:] for actor in kind.started]:
                with suppress(Exception):  # a dead worker is noticed by the next call to it
                    actor.call("ping")

    def _event(self, kind: str, **details: Any) -> None:
        with suppress(OSError):  # a full disk is reported where a checkpoint is written
            self._folder.event(kind, **details)

    def _engine_given(self) -> dict[str, Any]:
        """What `load_engine` is given (server/serve.py), and whether weights may change while rollouts are written."""
        settings = self._settings
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
