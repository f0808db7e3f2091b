"""All actors of a run: placed, started at the same time, prepared, and ended in reverse order.

All failures of a start are reported in one error. On a cluster at an address, rollout and reward workers outlive their
driver for a while: a driver that resumes the run finds them with their models loaded.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from podium.engine.build import fitted
from podium.errors import InputError, PodiumError
from podium.model.chat import tokenizer_fingerprint
from podium.remote.engine_pool import DEFAULT_CONCURRENCY
from podium.remote.pool import Rules
from podium.reward.build import ScoringRecipe
from podium.run.folder import RunFolder
from podium.runtime.on_ray.actors import ActorGroup
from podium.runtime.on_ray.calls import all_of, as_one
from podium.runtime.on_ray.cluster import Cluster
from podium.runtime.on_ray.rewards import RewardActor, RewardActors
from podium.runtime.on_ray.rollout_actor import RolloutActor
from podium.runtime.on_ray.rollouts import RolloutWorkers
from podium.runtime.on_ray.trainer import (
    About,
    ReferenceActor,
    RemotePolicy,
    RemoteReference,
    RemoteTrainer,
    TrainerActor,
)
from podium.runtime.wiring.memory import MemoryPlan
from podium.runtime.wiring.reference import reference_needs
from podium.settings.sections import SeparateReference
from podium.settings.tables import Settings

PING_S = 1.0


@dataclass(frozen=True)
class Needs:
    """How many actors there are, and the resources of each."""

    rollout_workers: tuple[int, int]
    reward_workers: int
    ranks: int
    references: int
    """1 where the reference is in an actor of its own."""
    gpus_per_rollout_worker: float | None
    gpus_per_rank: float | None
    cpus: float
    stalled_s: float
    """Seconds without a token after which a rollout worker is replaced."""

    @property
    def num_cpus(self) -> float:
        return self.cpus * (self.rollout_workers[1] + self.reward_workers + self.ranks + self.references)


class RunActors:
    """After `start` and `prepare`, `trainer`, `reference`, `engine` and `rewards` are what the loop needs."""

    trainer: RemoteTrainer
    reference: RemoteReference | None = None
    engine: RolloutWorkers
    rewards: RewardActors

    def __init__(self, settings: Settings, folder: RunFolder, needs: Needs, rules: Rules, cluster: Cluster) -> None:
        """`rules` are those of both pools; `rules.replicas` counts rollout workers."""
        self._settings, self._folder, self._needs, self._rules = settings, folder, needs, rules
        self._cluster = cluster
        self._kinds: list[ActorGroup] = []
        self._began: dict[str, dict[str, Any]] = {}
        """Events of the start, written once the run has begun."""
        self._over = threading.Event()
        if not cluster.is_own:
            threading.Thread(target=self._ping_untaken, daemon=True).start()

    def start(self, tokenizer: Any, longest_prompt: int) -> RemotePolicy:
        """Starts every actor and waits for all of them; returns what is then known of the policy."""
        self._settings = fitted(self._settings, longest_prompt)
        trainers, rollouts, rewards, *references = self._places()
        returned = self._find_returned(rollouts, rewards)
        calls: dict[str, Any] = {}
        for rank in range(self._needs.ranks):
            trainers.start_ahead(1 + rank, rank)
        meet_at = trainers.started[0].call("meeting_place") if self._needs.ranks > 1 else None
        for number, actor in enumerate(trainers.started, 1):
            calls[f"trainer-{number}"] = actor.call("load", meet_at)
        for kind in references:
            calls["reference-1"] = kind.start_ahead(1).call("load")
        for kind in (rollouts, rewards):
            for number in range(1 + len(kind.ready), 1 + kind.num_bundles):
                calls[f"{kind.name}-{number}"] = kind.start_ahead(number).call("start")
        found = all_of(calls, self._rules.start_s)
        for kind in (rollouts, rewards):
            new = [about for name, about in found.items() if name.startswith(f"{kind.name}-")]
            kind.ready += zip(kind.started[len(kind.started) - len(new) :], new, strict=True)
        about: About = found["trainer-1"]
        workers = {f"rollout-{number}": said for number, (_, said) in enumerate(rollouts.ready, 1)}
        _check_tokenizers(tokenizer, {"trainer-1": {"tokenizer": about.tokenizer}, **workers})
        self.trainer = RemoteTrainer(trainers.started[0])
        for kind in references:
            self.reference = RemoteReference(kind.started[0])
            self._began["reference_started"] = {key: found["reference-1"][key] for key in ("pid", "node")}
        self._make_engine(rollouts, about, returned)
        facts = (about.stop_ids, about.max_context_tokens, about.vocabulary, about.base_digest)
        return RemotePolicy(tokenizer, *facts)

    def prepare(self, steps: int, longest_prompt: int, recipe: ScoringRecipe) -> MemoryPlan:
        """Hands over what depends on the data: the number of steps, the longest prompt, the rewards that rows name."""
        trainers, _, rewards, *_ = self._kinds
        calls = {
            f"trainer-{n}": actor.call("build", steps, longest_prompt) for n, actor in enumerate(trainers.started, 1)
        }
        calls |= {f"reward-{n}": actor.call("prepare", recipe) for n, (actor, _) in enumerate(rewards.ready, 1)}
        memory = all_of(calls, self._rules.start_s)["trainer-1"]
        for actor in trainers.started[1:]:
            actor.call("follow")
        self.rewards = RewardActors(rewards, recipe, self._rules, self._event)
        return memory

    def close(self) -> None:
        """Ends the workers, their places and the cluster, in reverse order of their start."""
        self._over.set()
        if hasattr(self, "rewards"):
            self.rewards.close()
        for kind in reversed(self._kinds):
            kind.close()
        self._cluster.close()

    def _places(self) -> list[ActorGroup]:
        """Asks for all places at once, then waits for them."""
        needs, settings = self._needs, self._settings
        has_gpus = float(settings.model.device != "cpu" and self._cluster.num_gpus > 0)
        parallel = settings.engine.options.get("tensor_parallel") or 1

        def kind(
            name: str, cls: type, arguments: tuple[Any, ...], count: int, gpus: float, can_return: bool
        ) -> ActorGroup:
            asked = {"CPU": needs.cpus} | ({"GPU": gpus} if gpus else {})
            group = self._cluster.reserve(name, [asked] * count, can_return)
            return ActorGroup(self._cluster, name, cls, arguments, asked, group, count, can_return)

        gpus = _given_or(needs.gpus_per_rank, has_gpus), _given_or(needs.gpus_per_rollout_worker, parallel * has_gpus)
        least = needs.rollout_workers[0]
        self._kinds.append(kind("trainer", TrainerActor, (settings, needs.ranks), needs.ranks, gpus[0], False))
        self._kinds.append(kind("rollout", RolloutActor, (self._engine_given(),), least, gpus[1], True))
        is_all_ours = not any(
            ":" in reward.name for reward in settings.reward
        )  # a user's code may be edited before the next driver comes
        self._kinds.append(kind("reward", RewardActor, (), needs.reward_workers, 0.0, is_all_ours))
        if isinstance(apart := settings.model.reference, SeparateReference):
            model, *others = reference_needs(settings)
            asked = (model | {"device": apart.device}, *others)
            self._kinds.append(
                kind("reference", ReferenceActor, asked, 1, 0.0 if apart.device == "cpu" else gpus[0] or 1.0, False)
            )
        problems = _problems({each.name: lambda each=each: self._wait_for(each) for each in self._kinds})
        if problems:
            raise as_one(problems, len(self._kinds), "kinds of workers have no place")
        return self._kinds

    def _ping_untaken(self) -> None:
        """Workers end when no driver pings them, and a pool pings only those that it has taken."""
        while not self._over.wait(PING_S):
            for actor in [actor for kind in self._kinds[1:] for actor in kind.untaken]:
                with suppress(Exception):  # a dead worker is noticed by the next call to it
                    actor.call("ping")

    def _event(self, kind: str, **details: Any) -> None:
        with suppress(OSError):  # a full disk is reported where a checkpoint is written
            self._folder.event(kind, **details)

    def _wait_for(self, kind: ActorGroup) -> None:
        self._cluster.wait_for(kind.group, self._rules.start_s)

    def _engine_given(self) -> dict[str, Any]:
        """What `load_engine` is given (server/serve.py)."""
        settings = self._settings
        precision, engine = (
            settings.trainer.options.get("precision", "float32"),
            settings.engine.model_dump(mode="json"),
        )
        return {
            "model": settings.model.model_dump(mode="json"),
            "engine": settings.engine.name,
            "options": {key: value for key, value in engine.items() if key in settings.engine.options},
            "compute_dtype": None if precision == "float32" else precision,
        }

    def _find_returned(self, *kinds: ActorGroup) -> dict[str, int]:
        """Takes over workers of a former driver that hold what this run needs, and ends the others; counts per kind."""
        if self._cluster.is_own:
            return {}
        for kind in kinds:
            kind.adopt(self._engine_given() if kind.name == "rollout" else None)
        return {kind.name: len(kind.ready) for kind in kinds if kind.ready}

    def _share(self) -> int:
        """A worker's prompts of those that are written at the same time."""
        plan, most_workers = self._settings.plan, self._needs.rollout_workers[1]
        return -(-plan.prompts_ahead // most_workers)

    def _make_engine(self, rollouts: ActorGroup, about: About, returned: Mapping[str, int]) -> None:
        def began() -> None:
            self._event("trainer_started", pid=about.pid, node=about.node, ranks=self._needs.ranks)
            for event, details in self._began.items():
                self._event(event, **details)
            if returned:
                self._event("reattached", **returned)

        stalled_s, in_flight = self._needs.stalled_s, self._settings.run.in_flight
        concurrency = max(DEFAULT_CONCURRENCY, self._share() * self._settings.plan.rollouts_per_prompt)
        self.engine = RolloutWorkers(
            rollouts, concurrency, self._share(), self._rules, stalled_s, began, in_flight, self._event
        )


def _check_tokenizers(tokenizer: Any, said: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses tokenizers that differ between machines: the same ids would mean other texts."""
    here = tokenizer_fingerprint(tokenizer)
    other = [name for name, about in said.items() if about["tokenizer"] != here]
    if other:
        raise InputError(
            f"model.name: {', '.join(other)} found another tokenizer than the driver under that name; put the same "
            "model on every machine"
        )


def _problems(waits: Mapping[str, Callable[[], None]]) -> dict[str, PodiumError]:
    found = {}
    for name, wait in waits.items():
        try:
            wait()
        except PodiumError as error:
            found[name] = error
    return found


def _given_or(given: float | None, default: float) -> float:
    return default if given is None else given
