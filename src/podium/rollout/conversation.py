"""An episode of several turns: the policy writes, tools or an environment answer, until one of them ends it.

    prompt ids ─► policy's turn ─► bridge (mask 0) ─► policy's turn ─► bridge ─► …
                      │                ▲
                      └► calls, step ──┘   in killable processes, while other episodes are being written

The token law: what the engine reads for a turn is what it read for the turn before, plus the ids that it sampled then,
plus the bridge. Nothing sampled is decoded and encoded again. One episode is one rollout, however many turns it has.
The seed of its first turn is that of a single answer; later turns add their number.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.environment.episode.world import Episode, EpisodeFailedError, Playground, Reply, World
from podium.errors import EngineError, InputError
from podium.model.chat import after_thinking, decode_answer, opens_thinking, render
from podium.model.dialogue import Dialogue
from podium.records import FinishReason, PrefixGroup, Prompt, Request, Rollout, Span, Turn, ids_digest
from podium.rollout.single_turn import Outcome, SingleTurn, rollout_seed
from podium.settings.contracts import Temperature
from podium.stages import Engine


@dataclass
class Written:
    """What an episode has so far."""

    prompt_ids: tuple[int, ...]
    version: int
    """Of the engine's weights when the episode began."""
    num_opening: int = 0
    """Tokens that the environment put in front of the first turn."""
    token_ids: list[int] = field(default_factory=list)
    """After the prompt."""
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    reward: float | None = None
    num_retries: int = 0
    num_pauses: int = 0

    @property
    def read(self) -> tuple[int, ...]:
        """What the engine reads next."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def num_read(self) -> int:
        """Tokens that neither the row nor the policy wrote."""
        return self.num_opening + len(self.mask) - sum(self.mask)

    def open(self, prompt_ids: tuple[int, ...]) -> None:
        """The environment's first messages belong to the prompt."""
        self.num_opening, self.prompt_ids = len(prompt_ids) - len(self.prompt_ids), prompt_ids

    def add_bridge(self, ids: Sequence[int]) -> None:
        self.token_ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)

    def rollout(self, reason: FinishReason, text: str, index: int, seed: int, failure: str = "") -> Rollout:
        for span in self.spans:  # what is handed on is what was sampled
            assert ids_digest(self.token_ids[span.start : span.start + span.length]) == span.digest
        versions = [version for span in self.spans for version in span.policy_versions]
        return Rollout(
            token_ids=tuple(self.token_ids),
            rollout_logprobs=tuple(self.logprobs),
            loss_mask=tuple(self.mask),
            finish_reason=reason,
            text=text,
            policy_version_min=min(versions, default=self.version),
            policy_version_max=max(versions, default=self.version),
            sample_index=index,
            seed=seed,
            digest=ids_digest(self.token_ids),
            spans=tuple(self.spans),
            turns=tuple(self.turns),
            environment_reward=None if failure else self.reward,
            counts=dict(self.counts),
            failure=failure,
        )


class Conversation(SingleTurn):
    """Episodes with the tools of `[[tool]]` and the environment of `[environment]`."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        stop_ids: Sequence[int],
        vocabulary: int,
        rollouts_per_prompt: int,
        seed: int,
        purpose: str = "train",
        playground: Playground | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        *,
        temperature: Annotated[Temperature, Field(description="sampling temperature")] = 1.0,
        max_turns: Annotated[int, Field(ge=1, description="turns of the policy in an episode")] = 8,
        max_new_tokens: Annotated[
            int, Field(ge=1, description="tokens that the policy writes in all turns of an episode")
        ] = 512,
        max_turn_tokens: Annotated[
            int | None, Field(ge=1, description="longest turn of the policy; default: what is left of max_new_tokens")
        ] = None,
        max_read_tokens: Annotated[
            int, Field(ge=0, description="tokens of an episode that tools, environment and turn headers may take")
        ] = 1024,
        turn_timeout_s: Annotated[
            float, Field(gt=0, description="limit for one call of a tool or one step of the environment")
        ] = 30.0,
        episode_timeout_s: Annotated[
            float, Field(gt=0, description="limit for a whole episode; a later one counts as failed")
        ] = 1800.0,
        max_reply_characters: Annotated[
            int, Field(ge=1, description="of one tool result or message of the environment; the rest is cut off")
        ] = 4000,
        max_processes: Annotated[
            int, Field(ge=1, le=256, description="processes for tools, and as many for environments")
        ] = 64,
        process_memory_mb: Annotated[int, Field(ge=64, description="memory of each of these processes")] = 1024,
        call_format: Annotated[
            Literal["auto", "hermes", "llama3", "plain"],
            Field(description="how the policy writes tool calls; auto: as its chat template describes them"),
        ] = "auto",
        stop: Annotated[list[str], Field(description="further texts that end a turn; one token each")] = [],  # noqa: B006
        system: Annotated[str | None, Field(description="system message before every prompt")] = None,
    ) -> None:
        super().__init__(
            engine,
            tokenizer,
            stop_ids,
            vocabulary,
            rollouts_per_prompt,
            seed,
            purpose,
            top_k,
            top_p,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop=stop,
        )
        if playground is None or not (playground.schemas or playground.recipe.environment):
            raise InputError(
                "rollout.name = 'conversation' has nothing to talk to: add a [[tool]] table or [environment], or use "
                "rollout.name = 'single_turn'"
            )
        self._dialogue, self._system = Dialogue(tokenizer, self._sampling.stop_ids), playground.system(system)
        self._world = World(
            playground,
            self._dialogue.tool_role,
            timeout_s=turn_timeout_s,
            max_characters=max_reply_characters,
            max_processes=max_processes,
            memory_mb=process_memory_mb,
        )
        self._max_turns, self._max_turn_tokens = max_turns, max_turn_tokens or max_new_tokens
        self._max_read_tokens, self._episode_timeout_s = max_read_tokens, episode_timeout_s

    def close(self) -> None:
        """Ends the processes of tools and environments."""
        self._world.close()

    async def _rollout(self, prompt: Prompt, index: int) -> Outcome:
        """One episode. If the environment fails, the rollout is handed on without a reward."""
        seed = rollout_seed(self._seed, self._purpose, prompt.ordinal, index)
        name = f"{self._name(prompt)}/{index}"
        written = Written(prompt.token_ids, self._engine.policy_version or 0)
        opened: Prompt | None = None
        try:
            asked = replace(prompt, messages=_without_answer(prompt.messages))
            async with asyncio.timeout(self._episode_timeout_s), self._world.episode(asked) as episode:
                if messages := await episode.begin():
                    opened = self._opened(prompt, messages)
                    written.open(opened.token_ids)
                if self._world.has_environment:
                    written.reward = 0.0
                reason = await self._play(prompt, index, seed, name, written, episode)
            rollout = written.rollout(reason, _last_text(written), index, seed)
        except (EpisodeFailedError, TimeoutError) as error:
            late = f"the episode took longer than episode_timeout_s = {self._episode_timeout_s:g} s"
            failure = late if isinstance(error, TimeoutError) else str(error)
            rollout = written.rollout("abort", _last_text(written), index, seed, failure)
        except _NoAnswerError as error:
            return Outcome(None, written.num_retries, failure=f"{prompt.label}: {error}", prompt=opened)
        finally:
            self._engine.release(name)
        return Outcome(rollout, written.num_retries, written.num_pauses, prompt=opened)

    async def _play(
        self, prompt: Prompt, index: int, seed: int, name: str, written: Written, episode: Episode
    ) -> FinishReason:
        """Turn after turn, until something ends the episode."""
        for turn in range(self._max_turns):
            left = min(self._max_turn_tokens, self._sampling.max_new_tokens - sum(written.mask))
            if left < 1:
                return "length"
            turn_seed = seed if turn == 0 else rollout_seed(self._seed, self._purpose, prompt.ordinal, index, turn)
            is_shared = turn == 0 and written.prompt_ids == prompt.token_ids and not self._world.has_environment
            group = PrefixGroup(self._name(prompt), self._rollouts_per_prompt) if is_shared else None
            request = Request(
                written.read, replace(self._sampling, max_new_tokens=left), turn_seed, group, episode=name
            )
            text, last_id, is_cut = await self._written_turn(prompt, request, written)
            reply = await episode.answer(self._after_thinking(text, request.token_ids))
            written.turns += _turns_of(reply)
            written.counts.update(reply.counts)
            if reply.reward is not None:
                before = written.reward or 0.0 if self._world.playground.reward == "sum" else 0.0
                written.reward = before + reply.reward
            if reply.done:  # without an environment, a turn that was cut before its call is no end of its own
                return "length" if is_cut and not self._world.has_environment else "stop"
            bridge = self._dialogue.bridge(reply.messages, last_id)
            if written.num_read + len(bridge) > self._max_read_tokens:
                return "length"
            if turn + 1 < self._max_turns:
                written.add_bridge(bridge)
        return "turns"

    async def _written_turn(self, prompt: Prompt, request: Request, written: Written) -> tuple[str, int, bool]:
        """(the turn's text, its last id, whether it was cut): asks the engine and keeps what it sampled."""
        assert request.token_ids == written.read  # the token law
        started = time.monotonic()
        answer, num_retries, fault = await self._asked(prompt, request)
        written.num_retries = max(written.num_retries, num_retries)
        if answer is None:
            raise _NoAnswerError(fault)
        span = Span(len(written.token_ids), len(answer.token_ids), request.seed, answer.policy_versions, answer.digest)
        written.spans.append(span)
        written.token_ids += answer.token_ids
        written.logprobs += answer.logprobs
        written.mask += [1] * len(answer.token_ids)
        written.num_pauses += answer.num_pauses
        text = decode_answer(self._tokenizer, answer.token_ids)
        written.turns.append(Turn("assistant", text, time.monotonic() - started))
        return text, answer.token_ids[-1], answer.finish_reason == "length"

    def _after_thinking(self, text: str, prompt_ids: Sequence[int]) -> str:
        """What tools and the environment read of a turn: not the thinking, and nothing of a turn that ends in it."""
        return after_thinking(text, opens_thinking(self._tokenizer, prompt_ids)) or ""

    def _opened(self, prompt: Prompt, messages: Sequence[Mapping[str, str]]) -> Prompt:
        """The prompt with the environment's first messages behind those of the row."""
        every = (*_without_answer(prompt.messages), *messages)
        ids = render(self._tokenizer, every, self._system, self._world.playground.in_template)
        if len(ids) - len(prompt.token_ids) > self._max_read_tokens:
            raise EpisodeFailedError(
                f"the environment's first message has {len(ids) - len(prompt.token_ids)} tokens, more than "
                f"rollout.max_read_tokens = {self._max_read_tokens}"
            )
        return replace(prompt, messages=every, token_ids=ids)


class _NoAnswerError(EngineError):
    """No answer of the engine to a request could be right."""


def _without_answer(messages: Sequence[Mapping[str, str]]) -> tuple[Mapping[str, str], ...]:
    """A row may end in an example answer, which nobody is shown."""
    turns = list(messages)
    while turns and turns[-1]["role"] == "assistant":
        turns.pop()
    return tuple(turns)


def _last_text(written: Written) -> str:
    """The policy's last turn."""
    return next((turn.text for turn in reversed(written.turns) if turn.role == "assistant"), "")


def _turns_of(reply: Reply) -> list[Turn]:
    """The messages of a reply; its seconds stand at the first."""
    seconds = reply.counts.get("tool_s", reply.counts.get("environment_s", 0.0))
    return [Turn(each["role"], each["content"], 0.0 if place else seconds) for place, each in enumerate(reply.messages)]
