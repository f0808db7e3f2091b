"""Many engines as one: a pool (remote/pool.py) whose members hold weights and answer requests.

In: requests and weights. Out: answers. `engine.name = "pool"` and the rollout workers of the Ray runtime use it; they
differ in how a member starts and how weights reach it.

The requests of a prefix group go to one member together, which computes their prompt once. Those of an episode go to
the member that began it, if that member has room. When a member is lost, another one gets the rollouts that it had not
finished. A rollout that fails too often is an error, never a rollout without tokens.

The rounding of an in-process engine on a CPU depends on the batch. So a pool of such members always cuts the requests
of one turn into the same batches; a member writes one batch at a time, and a lost batch is sent again whole.

Before a member serves, it loads the current weights, confirms version and hash, and scores the probe of the last push
as the other members did.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from time import monotonic
from typing import Any, Protocol

from podium.errors import EngineError, PodiumError, WeightsError
from podium.model.evidence import Held, allowed_gap, is_among, mean_gap
from podium.records import Answer, EngineTraits, Request, Sampling
from podium.remote.pool import MISSES, Limit, Member, OnEvent, Pool, RetriesError, Rules, Worker
from podium.remote.rollouts import Batching
from podium.remote.tasks import LoopThread, all_or_none, end_tasks
from podium.stages import OnTokens

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}
"""Largest mean difference of a new member's logprobs from those of the others."""
DEFAULT_CONCURRENCY = 256
"""Rollouts in flight per member."""
CLOSE_S = 60.0
CHECK_PAUSE_S = 5.0
"""Between two requests for a token that show that a member still generates."""
ONE_TOKEN = Request((1, 1), Sampling(max_new_tokens=1, temperature=0.0), seed=0)


class EngineWorker(Worker, Protocol):
    """A worker with an engine."""

    engine: Any
    """The Engine at the other end."""

    async def load(self, weights: Any, version: int, /) -> None:
        """Loads published weights of the pool into the engine."""
        ...


@dataclass(eq=False)
class EngineMember(Member[EngineWorker]):
    policy_version: int | None = None
    """Of the weights that it confirmed; None before its first load."""
    loads: int = 0
    """Increases when a load of weights begins and when it ends, so it is odd during a load."""


@dataclass(frozen=True)
class Weights:
    """The weights that members hold, or should hold."""

    source: Any
    """Where they are, as a worker's `load` takes it."""
    version: int


@dataclass
class Probe:
    """How members with the current weights score fixed tokens."""

    version: int
    token_ids: list[int]
    logprobs: list[float]
    held: tuple[Held, ...] = ()
    """What the members showed of these weights."""


class EnginePool:
    """The pool runs in a thread of its own. A subclass starts it (`_start`) and closes it."""

    traits = EngineTraits(channels=("adapter", "disk"), has_members=True, shows_weights=True)

    def __init__(
        self,
        rules: Rules,
        traits: EngineTraits,
        concurrency: int | None,
        stalled_s: float,
        on_event: OnEvent,
        batch_groups: int = 4,
    ) -> None:
        """`concurrency`: rollouts in flight per member; None: adaptive. `stalled_s`: a member that generates no token
        for so long is replaced. `on_event` receives what happens to members; a run writes it to its event log.
        `batch_groups`: prefix groups per batch, where members keep the order."""
        self.policy_version: int | None = None
        self.traits, self._on_event = traits, on_event
        self._batch_groups = batch_groups if traits.keeps_order else 1
        self._stalled_s, self._thread, self._pushing = stalled_s, LoopThread(), asyncio.Lock()
        self._batching = Batching(self._answers, self._batches)
        self._homes: dict[str, EngineMember] = {}
        """The member that wrote each episode last."""
        self._weights: Weights | None = None
        self._probe: Probe | None = None
        self._shown: list[Held] = []
        """What members show of their weights; pushes are shown before they are scored."""

        def new_member(name: str, worker: EngineWorker) -> EngineMember:
            return EngineMember(name, worker, Limit(1 if traits.keeps_order else concurrency))

        self._pool: Pool[EngineMember] = Pool(rules, new_member, self._prepare, self._event, self._stalled)

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        return await self._batching.generate(request, on_tokens)

    def release(self, name: str) -> None:
        self._homes.pop(name, None)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """One member's. The check of a push compares all of them with the trainer's (`score_each`)."""
        return next(iter((await self.score_each(token_ids)).values()))

    async def score_each(self, token_ids: Sequence[int]) -> dict[str, list[float]]:
        """By every member in service, by name, so that the check of a push can name the member at fault."""
        return await self._thread.call(self._score_each(list(token_ids)))

    async def held_each(self) -> dict[str, Held | None]:
        """Checksums of the weights of every member in service, by name; None: a member cannot show them."""
        return await self._thread.call(self._held_each())

    async def _push(self, weights: Weights) -> None:
        """Every member loads the weights or is replaced; raises unless enough have them. The first push starts the
        pool."""
        async with self._pushing:
            before, self._weights = self._weights, weights
            if before is None:
                self._start()
                await self._pool.until(lambda: all(replica.was_tried for replica in self._pool.replicas))
            elif not await self._load_all(weights):
                self._weights = before  # all members rejected the weights and keep those that they have
                raise WeightsError(f"no member took version {weights.version}: {self._pool.problems()}")
            await self._pool.until(lambda: self._num_members(weights.version) >= self._pool.rules.floor)

    async def _score_each(self, token_ids: list[int]) -> dict[str, list[float]]:
        """The logprobs of every member, by name; remembered as the probe for members that start later."""
        assert self._weights is not None
        version = self._weights.version
        scores = await self._pool.ask_each(lambda member: member.worker.engine.score(token_ids), "score the probe")
        self._probe = Probe(version, token_ids, next(iter(scores.values())), tuple(self._shown))
        return scores

    async def _held_each(self) -> dict[str, Held | None]:
        """Checksums of the weights that every member samples with; remembered for members that start later."""
        held: dict[str, Held | None] = await self._pool.ask_each(
            lambda member: member.worker.engine.held(), "show its weights"
        )
        self._shown = [each for each in held.values() if each is not None]
        return held

    async def _answers(self, requests: list[Request]) -> AsyncGenerator[tuple[int, Answer]]:
        """Each answer as it arrives, with the place of its request. The pool's thread sends the requests."""
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[int, Answer] | None] = asyncio.Queue()

        def hand_over(place: int, answer: Answer) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed
                here.call_soon_threadsafe(arrived.put_nowait, (place, answer))

        sending = asyncio.ensure_future(self._thread.call(self._send(requests, hand_over)))
        sending.add_done_callback(lambda _: arrived.put_nowait(None))
        try:
            while (item := await arrived.get()) is not None:
                yield item
            if sending.cancelled():
                raise EngineError("the pool was closed before the engine answered")
            await sending
        finally:
            await end_tasks([sending])

    def _batches(self, requests: Sequence[Request]) -> list[list[int]]:
        """Which requests go to one member together: prefix groups, several where members keep the order."""
        groups: dict[Any, list[int]] = {}
        for place, request in enumerate(requests):
            key = place if request.prefix_group is None else request.prefix_group.name
            groups.setdefault(key, []).append(place)
        found, size = list(groups.values()), self._batch_groups
        return [list(chain(*found[first : first + size])) for first in range(0, len(found), size)]

    async def _send(self, requests: list[Request], hand_over: Callable[[int, Answer], None]) -> None:
        """Sends the requests to one member after the other until all are answered."""
        missing, is_whole = dict(enumerate(requests)), self.traits.keeps_order
        label, episode = requests[0].label, requests[0].episode

        async def ask(member: EngineMember) -> None:
            """All that is missing; the whole batch, where members keep the order."""
            started, longest, asked = monotonic(), 1, dict(missing)
            if episode is not None:
                self._homes[episode] = member
            if is_whole:
                asked = dict(enumerate(requests))
            elif len(missing) < len(requests):  # another member has a part of the prefix group
                asked = {place: replace(request, prefix_group=None) for place, request in missing.items()}

            async def write(place: int, request: Request) -> None:
                nonlocal longest
                answer = await member.worker.engine.generate(request)
                longest = max(longest, len(answer.token_ids))
                if missing.pop(place, None) is not None:
                    hand_over(place, answer)
                    if not is_whole:
                        self._pool.release(member, 1)

            await all_or_none(write(place, request) for place, request in asked.items())
            is_wanted = self._pool.waiting_since is not None
            member.limit.finished(monotonic() - started, longest, len(asked), is_wanted)

        try:
            await self._pool.send(
                lambda: len(requests if is_whole else missing),
                ask,
                lambda: {"request": label, "rollouts": len(missing)},
                self._homes.get(episode or ""),
            )
        except RetriesError as error:
            raise EngineError(
                f"{label}: {len(missing)} rollouts were given up after {len(error.reasons)} members failed at them "
                f"(engine.max_redispatches = {self._pool.rules.max_redispatches}): {error}"
            ) from None

    async def _load_all(self, weights: Weights) -> bool:
        """Whether the push succeeded. Members that did not confirm it while others did are replaced. If all reject the
        weights, the weights are at fault."""
        answers = await self._pool.broadcast(self._pool.members, lambda member: self._load(member, weights))
        failed = {member: error for member, error in answers.items() if error is not None}
        if failed and len(failed) == len(answers) and all(isinstance(e, WeightsError) for e in failed.values()):
            for replica in self._pool.replicas:
                if replica.member in failed:
                    replica.last_problem = str(failed[replica.member])
            return False
        for member, error in failed.items():
            member.mark_lost(f"did not take version {weights.version}: {error}")
        return True

    async def _load(self, member: EngineMember, weights: Weights) -> None:
        member.loads += 1
        try:
            await member.worker.load(weights.source, weights.version)
        finally:
            member.loads += 1
        confirmed = member.worker.engine.policy_version
        if confirmed != weights.version:
            raise EngineError(f"it says that it holds version {confirmed}")
        member.policy_version = weights.version

    async def _prepare(self, member: EngineMember) -> Mapping[str, Any]:
        """Loads the current weights and compares the member with the others, if their scores are known. Repeats this if
        either changed meanwhile."""
        proven: tuple[Weights | None, Probe | None] = (None, None)
        while proven != (self._weights, self._probe):
            weights, probe = self._weights, self._probe
            assert weights is not None
            if member.policy_version != weights.version:
                try:
                    await self._load(member, weights)
                except (PodiumError, OSError) as error:
                    if weights is not self._weights:
                        continue  # newer weights replaced them meanwhile, and their folder is gone
                    raise EngineError(f"{member.name} did not take version {weights.version}: {error}") from None
            if probe is not None and probe.version == weights.version:
                try:
                    await self._compare(member, probe)
                except EngineError:
                    if weights is not self._weights:
                        continue
                    raise
            proven = (weights, probe)
        return {"policy_version": member.policy_version}

    async def _compare(self, member: EngineMember, probe: Probe) -> None:
        said = f"{member.name} says that it holds version {probe.version}"
        if probe.held and not is_among(await member.worker.engine.held(), probe.held):
            raise EngineError(f"{said}, but it does not hold the weights that the others hold")
        gap = mean_gap(await member.worker.engine.score(probe.token_ids), probe.logprobs)
        if not gap <= allowed_gap(TOLERANCE[self.traits.dtype], probe.logprobs):
            raise EngineError(f"{said}, but its logprobs differ from the others' by {gap:.2e} on average")

    async def _stalled(self, member: EngineMember) -> str:
        """Returns once the member does not generate any more. A large batch may delay the one token that is asked for.
        A load of weights has its own limit and does not count."""
        limit_s, misses = self._stalled_s, 0
        while True:
            loads = member.loads
            try:
                async with asyncio.timeout(limit_s):
                    await self._sign_of_work(member.worker.engine)
                misses = 0
            except TimeoutError:
                if member.loads == loads and loads % 2 == 0:
                    return f"stalled: not a token within {limit_s:g} s"
            except (OSError, PodiumError) as error:
                misses += 1
                if misses == MISSES:
                    return f"broken: {error}"
            await asyncio.sleep(min(limit_s, CHECK_PAUSE_S))

    async def _sign_of_work(self, engine: Any) -> None:
        """Returns when the engine computes. A token would join the batch under way and change its rounding."""
        if self.traits.keeps_order:
            await engine.score(ONE_TOKEN.token_ids)
        else:
            await engine.generate(ONE_TOKEN)

    def _start(self) -> None:
        """Starts the pool with the subclass's workers."""
        raise NotImplementedError

    def _num_members(self, version: int) -> int:
        return sum(member.policy_version == version for member in self._pool.members)

    def _event(self, kind: str, **details: Any) -> None:
        with suppress(OSError):  # a full disk is reported by the writers whose files must not be missed
            self._on_event(kind, **details)
