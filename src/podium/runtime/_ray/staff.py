"""All actors of a run: given places, started at the same time, made ready, and ended in reverse order.

What fails while they start is told together, in one error. On a cluster at an address rollout and reward workers
outlive their driver for a while: one that takes the run up again finds them, with their models loaded.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from podium.engine._pool.together import PROMPTS_PER_REQUEST
from podium.errors import InputError, PodiumError
from podium.model.fingerprint import tokenizer_fingerprint
from podium.run_folder import RunFolder
from podium.runtime._engine import fitted
from podium.runtime._memory import MemoryPlan
from podium.runtime._ray.actors import Actors
from podium.runtime._ray.calls import all_of, as_one
from podium.runtime._ray.cluster import Cluster
from podium.runtime._ray.limits import Limits
from podium.runtime._ray.reference import RemoteReference
from podium.runtime._ray.reference_actor import ReferenceActor
from podium.runtime._ray.reward_actor import RewardActor
from podium.runtime._ray.rewards import RewardActors
from podium.runtime._ray.rollout_actor import RolloutActor
from podium.runtime._ray.rollouts import RolloutWorkers
from podium.runtime._ray.trainer import RemotePolicy, RemoteTrainer
from podium.runtime._ray.trainer_actor import About, TrainerActor
from podium.runtime._reference import Referenced, reference_needs
from podium.runtime._rewards import ScoringRecipe
from podium.sections import SeparateReference
from podium.settings import Settings

COMPANY_S = 1.0


@dataclass(frozen=True)
class Needs:
    """How many actors there are, and what each asks for."""

    rollout_workers: tuple[int, int]
    reward_workers: int
    ranks: int
    references: int
    """1 where the reference is apart from the trainer."""
    gpus_per_rollout_worker: float | None
    gpus_per_rank: float | None
    cpus: float
    prompts_per_request: int | None

    @property
    def num_cpus(self) -> float:
        return self.cpus * (self.rollout_workers[1] + self.reward_workers + self.ranks + self.references)


class Staff:
    """`hire`, then `prepare`; then `trainer`, `engine` and `rewards` are what the loop needs."""

    trainer: RemoteTrainer | Referenced
    engine: RolloutWorkers
    rewards: RewardActors

    def __init__(self, settings: Settings, folder: RunFolder, needs: Needs, limits: Limits, cluster: Cluster) -> None:
        self._settings, self._folder, self._needs, self._limits = settings, folder, needs, limits
        self._cluster = cluster
        self._kinds: list[Actors] = []
        self._began: dict[str, dict[str, Any]] = {}
        """Events of the start, told once the run has begun."""
        self._over = threading.Event()
        if not cluster.is_own:
            threading.Thread(target=self._keep_company, daemon=True).start()

    def hire(self, tokenizer: Any, longest_prompt: int) -> RemotePolicy:
        """Starts every actor and waits for all of them; what is known of the policy then."""
        self._settings = fitted(self._settings, longest_prompt)
        trainers, rollouts, rewards, *references = self._places()
        returned = self._find_returned(rollouts, rewards)
        calls: dict[str, Any] = {}
        for rank in range(self._needs.ranks):
            trainers.start_ahead(1 + rank, rank)
        meet_at = trainers.started[0].meeting_place.remote() if self._needs.ranks > 1 else None
        for number, actor in enumerate(trainers.started, 1):
            calls[f"trainer-{number}"] = actor.load.remote(meet_at)
        for kind in references:
            calls["reference-1"] = kind.start_ahead(1).load.remote()
        for kind in (rollouts, rewards):
            for seat in range(1 + len(kind.ready), 1 + kind.num_bundles):
                calls[f"{kind.name}-{seat}"] = kind.start_ahead(seat).start.remote()
        found = all_of(calls, self._limits.start_s)
        for kind in (rollouts, rewards):
            new = [about for name, about in found.items() if name.startswith(f"{kind.name}-")]
            kind.ready += zip(kind.started[len(kind.started) - len(new) :], new, strict=True)
        about: About = found["trainer-1"]
        workers = {f"rollout-{seat}": said for seat, (_, said) in enumerate(rollouts.ready, 1)}
        _check_tokenizers(tokenizer, {"trainer-1": {"tokenizer": about.tokenizer}, **workers})
        self.trainer = RemoteTrainer(trainers.started[0])
        for kind in references:
            self.trainer = Referenced(self.trainer, RemoteReference(kind.started[0]))
            self._began["reference_started"] = {key: found["reference-1"][key] for key in ("pid", "node")}
        self._make_engine(rollouts, about, returned)
        facts = (about.stop_ids, about.max_context_tokens, about.vocabulary, about.base_digest)
        return RemotePolicy(tokenizer, *facts)

    def prepare(self, steps: int, longest_prompt: int, recipe: ScoringRecipe) -> MemoryPlan:
        """What has to wait for the data: the optimizer's schedule, the longest document, the rewards that rows name."""
        trainers, _, rewards, *_ = self._kinds
        calls = {
            f"trainer-{n}": actor.build.remote(steps, longest_prompt) for n, actor in enumerate(trainers.started, 1)
        }
        calls |= {f"reward-{n}": actor.prepare.remote(recipe) for n, (actor, _) in enumerate(rewards.ready, 1)}
        memory = all_of(calls, self._limits.start_s)["trainer-1"]
        for actor in trainers.started[1:]:
            actor.follow.remote()
        self.rewards = RewardActors(rewards, recipe, self._limits, self._tell)
        return memory

    def close(self) -> None:
        """The workers, their places, the cluster: in reverse of how they came."""
        self._over.set()
        if hasattr(self, "rewards"):
            self.rewards.close()
        for kind in reversed(self._kinds):
            kind.close()
        self._cluster.close()

    def _places(self) -> list[Actors]:
        """Asked for at once, then waited for."""
        needs, settings = self._needs, self._settings
        has_gpus = float(settings.model.device != "cpu" and self._cluster.num_gpus > 0)
        parallel = settings.engine.options.get("tensor_parallel") or 1
        tables: Any = settings.to_dict()

        def kind(name: str, cls: type, arguments: tuple[Any, ...], count: int, gpus: float, can_return: bool) -> Actors:
            asked = {"CPU": needs.cpus} | ({"GPU": gpus} if gpus else {})
            group = self._cluster.reserve(name, [asked] * count, can_return)
            return Actors(self._cluster, name, cls, arguments, asked, group, count, can_return)

        gpus = _given_or(needs.gpus_per_rank, has_gpus), _given_or(needs.gpus_per_rollout_worker, parallel * has_gpus)
        least = needs.rollout_workers[0]
        self._kinds.append(kind("trainer", TrainerActor, (tables, needs.ranks), needs.ranks, gpus[0], False))
        self._kinds.append(kind("rollout", RolloutActor, (self._engine_given(),), least, gpus[1], True))
        is_all_ours = not any(":" in reward.name for reward in settings.reward)  # else it may be edited meanwhile
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

    def _keep_company(self) -> None:
        """Workers leave when they hear of no driver; a pool's heartbeat begins when they are first needed."""
        while not self._over.wait(COMPANY_S):
            for actor in [actor for kind in self._kinds[1:] for actor in kind.unseated]:
                with suppress(Exception):  # one that died is found out by whoever needs it
                    actor.ping.remote()

    def _tell(self, kind: str, **details: Any) -> None:
        with suppress(OSError):  # a full disk is found out by whoever writes what cannot be missed
            self._folder.event(kind, **details)

    def _wait_for(self, kind: Actors) -> None:
        self._cluster.wait_for(kind.group, self._limits.start_s)

    def _engine_given(self) -> dict[str, Any]:
        """What `load_engine` needs to know (runtime/_keeper.py)."""
        settings = self._settings
        precision = settings.trainer.options.get("precision", "float32")
        return {
            "model": settings.model.model_dump(mode="json"),
            "engine": settings.engine.name,
            "options": dict(settings.engine.options),
            "compute_dtype": None if precision == "float32" else precision,
        }

    def _find_returned(self, *kinds: Actors) -> dict[str, int]:
        """How many of each kind were found again, loaded with what this run needs; others are ended."""
        if self._cluster.is_own:
            return {}
        for kind in kinds:
            kind.adopt(self._engine_given() if kind.name == "rollout" else None)
        return {kind.name: len(kind.ready) for kind in kinds if kind.ready}

    def _prompts_together(self, engine: str) -> int:
        """A worker's share of a step, where it writes that in one batch and nobody is to be served beside it."""
        plan, most_workers = self._settings.plan, self._needs.rollout_workers[1]
        if engine == "inprocess" and not plan.max_lag:
            return -(-plan.prompts_per_window // most_workers)
        return PROMPTS_PER_REQUEST[engine]

    def _make_engine(self, rollouts: Actors, about: About, returned: Mapping[str, int]) -> None:
        dtypes = {said["dtype"] for _, said in rollouts.ready}
        dtype = "bfloat16" if "bfloat16" in dtypes else "float32"
        name, replicas = self._settings.engine.name, self._needs.rollout_workers

        def began() -> None:
            self._tell("trainer_started", pid=about.pid, node=about.node, ranks=self._needs.ranks)
            for event, details in self._began.items():
                self._tell(event, **details)
            if returned:
                self._tell("reattached", **returned)

        together = self._needs.prompts_per_request or self._prompts_together(name)
        self.engine = RolloutWorkers(rollouts, name, dtype, replicas, together, self._limits, began)
        self.engine.in_flight, self.engine.on_event = self._settings.run.in_flight, self._tell


def _check_tokenizers(tokenizer: Any, said: Mapping[str, Mapping[str, Any]]) -> None:
    """Other words by the same ids would be trained on in silence."""
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
