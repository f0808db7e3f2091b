"""The contract of an engine (`podium.stages.Engine`), as checks that run against a running engine.

In: an engine, and the policy whose weights are loaded into it. Out: nothing, or a `ContractError` that lists every rule
that the engine breaks. For people who write an engine (docs/how_to/add_an_engine.md); Podium's own engines pass the
same checks in tests/engine/test_contract.py. The checks load weights into the engine and never change the policy.
"""

import asyncio
import inspect
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from podium.errors import EngineError, InputError
from podium.model.forward import sequence_logprobs
from podium.model.handoff import publish, remove_published
from podium.model.load import Policy
from podium.records import Answer, PrefixGroup, Request, Sampling
from podium.rollout.single_turn import answer_fault
from podium.settings.contracts import check_traits

MAX_S = 120.0
"""Time limit of one check."""
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1}
"""Largest allowed difference of a logprob from the trainer's, by the engine's precision."""
LONG = Sampling(max_new_tokens=24)


class ContractError(EngineError):
    """The engine breaks the contract."""


@dataclass
class Bench:
    """An engine under test and the policy whose weights it takes."""

    engine: Any
    policy: Policy
    version: int = -1

    async def load(self) -> None:
        """Loads the policy's current weights as the next version, through memory if the engine can, else by folder."""
        traits, version = self.engine.traits, self.version + 1
        if "shared" in traits.channels:
            await self.engine.load_weights(self.policy.named_weights(), version)
        else:
            with tempfile.TemporaryDirectory(prefix="podium-weights-") as own:
                root = traits.weights_root or Path(own)
                folder = publish(root, self.policy, self.policy.named_weights(), version)
                try:
                    await self.engine.load_folder(folder, version)
                finally:
                    remove_published(folder)
        self.version = version

    def requests(self, count: int, sampling: Sampling = LONG, group: str | None = None) -> list[Request]:
        """`count` requests with different seeds. In a `group` all have the same prompt; else prompts differ."""
        texts = ["What is 37 + 48?"] if group else ["What is 37 + 48?", "What is 10 - 99?", "37 + 48", "2"]
        prompts = [self.ids(texts[k % len(texts)]) for k in range(count)]
        shared = PrefixGroup(group, count) if group else None
        return [Request(ids, sampling, 100 + k, shared) for k, ids in enumerate(prompts)]

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.policy.tokenizer.encode(f"{text}\n"))

    async def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Sends all requests at the same time."""
        return list(await asyncio.gather(*(self.engine.generate(request) for request in requests)))

    async def texts(self, requests: Sequence[Request]) -> list[tuple[int, ...]]:
        return [answer.token_ids for answer in await self.answers(requests)]

    def expected(self, request: Request, answer: Answer) -> list[float]:
        """The trainer's logprobs of the answer, at temperature 1."""
        ids = [*request.token_ids, *answer.token_ids]
        return sequence_logprobs(self.policy.model, ids)[len(request.token_ids) - 1 :]

    def logits(self, request: Request, answer: Answer) -> torch.Tensor:
        """The trainer's logits `[answer, vocabulary]`, from which each token of the answer is drawn."""
        ids = torch.tensor([[*request.token_ids, *answer.token_ids]], device=self.policy.device)
        with torch.no_grad():
            return self.policy.model(ids).logits[0, len(request.token_ids) - 1 : -1].float()

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.engine.traits.dtype]


Check = Callable[[Bench], Awaitable[None]]


def expect(is_true: bool, complaint: str) -> None:
    if not is_true:
        raise ContractError(complaint)


def expect_near(found: Sequence[float], wanted: Sequence[float], allowed: float, what: str) -> None:
    expect(len(found) == len(wanted), f"{what}: {len(found)} values, expected {len(wanted)}")
    gap = max((abs(a - b) for a, b in zip(found, wanted, strict=True)), default=0.0)
    expect(gap <= allowed, f"{what} differ by {gap:.2g}; at most {allowed:.2g} is allowed")


async def it_has_the_methods_that_its_traits_promise(bench: Bench) -> None:
    check_traits(type(bench.engine).__name__, bench.engine)


async def every_request_has_one_answer_that_can_be_right(bench: Bench) -> None:
    for answer in await bench.answers(bench.requests(12)):
        fault = answer_fault(answer, LONG, bench.policy.vocabulary)
        expect(fault is None, f"an answer is invalid: {fault}")
        expect(answer.finish_reason == "length", f"finish_reason is {answer.finish_reason!r} without stop ids")
        expect(answer.policy_versions == (bench.version,) * 2, f"policy_versions are {answer.policy_versions}")


async def logprobs_are_those_of_the_trainer(bench: Bench) -> None:
    asked = bench.requests(4)
    for request, answer in zip(asked, await bench.answers(asked), strict=True):
        expect_near(answer.logprobs, bench.expected(request, answer), bench.tolerance, "logprobs")


async def logprobs_are_of_the_tempered_distribution(bench: Bench) -> None:
    for temperature in (0.5, 1.5):
        [request] = bench.requests(1, Sampling(max_new_tokens=6, temperature=temperature))
        [answer] = await bench.answers([request])
        every = (bench.logits(request, answer) / temperature).log_softmax(-1)
        wanted = [float(row[token]) for row, token in zip(every, answer.token_ids, strict=True)]
        expect_near(answer.logprobs, wanted, bench.tolerance, f"logprobs at temperature {temperature}")


async def scores_are_those_of_the_trainer_also_while_rollouts_are_written(bench: Bench) -> None:
    ids = bench.ids("What is 12 + 13?")
    wanted = sequence_logprobs(bench.policy.model, list(ids))
    expect_near(await bench.engine.score(ids), wanted, bench.tolerance, "scores")
    _, meanwhile = await asyncio.gather(bench.answers(bench.requests(4)), bench.engine.score(ids))
    expect_near(meanwhile, wanted, bench.tolerance, "scores while rollouts are generated")


async def the_seed_decides_the_tokens(bench: Bench) -> None:
    asked = bench.requests(6, group="contract/seed")
    first, again = await bench.texts(asked), await bench.texts(asked)
    expect(first == again, "the same seeds gave different tokens")
    expect(len(set(first)) > 1, "different seeds of one prompt gave the same tokens")


async def what_else_is_outstanding_changes_no_tokens(bench: Bench) -> None:
    asked = bench.requests(5)
    alone = [(await bench.texts([request]))[0] for request in asked]
    others = bench.requests(20, Sampling(max_new_tokens=9, temperature=0.7))
    meanwhile, _ = await asyncio.gather(bench.texts(asked), bench.texts(others))
    expect(meanwhile == alone, "tokens depend on the other requests that are being served")


async def each_request_has_its_own_sampling(bench: Bench) -> None:
    """Sampled, greedy, short, with stop ids, top-k and top-p: at the same time, and each as if alone."""
    stops = tuple(range(0, bench.policy.vocabulary, 2))
    samplings = [
        LONG,
        Sampling(max_new_tokens=24, temperature=0.0),
        Sampling(max_new_tokens=3),
        Sampling(max_new_tokens=24, stop_ids=stops),
        Sampling(max_new_tokens=12, temperature=0.6, top_k=5),
        Sampling(max_new_tokens=12, top_p=0.8),
    ]
    [request] = bench.requests(1)
    asked = [replace(request, sampling=sampling) for sampling in samplings]
    together = await bench.answers(asked)
    alone = [(await bench.answers([each]))[0] for each in asked]
    for one, other, sampling in zip(together, alone, samplings, strict=True):
        expect(one.token_ids == other.token_ids, f"next to others, {sampling} gives different tokens")
        same_end = one.finish_reason == other.finish_reason
        expect(same_end, f"next to others, {sampling} gives a different finish_reason")
    lengths = [len(answer.token_ids) for answer in together[:3]]
    expect(lengths == [24, 24, 3], "a request does not get its own max_new_tokens")


async def stop_ids_end_an_answer_and_are_kept(bench: Bench) -> None:
    stops = tuple(range(0, bench.policy.vocabulary, 2))
    for answer in await bench.answers(bench.requests(6, Sampling(max_new_tokens=40, stop_ids=stops))):
        *before, last = answer.token_ids
        expect(not set(before) & set(stops), "tokens follow a stop id")
        wanted = "stop" if last in stops else "length"
        expect(answer.finish_reason == wanted, f"finish_reason is {answer.finish_reason!r}, expected {wanted!r}")
    every = tuple(range(bench.policy.vocabulary))
    [alone] = await bench.answers(bench.requests(1, Sampling(max_new_tokens=8, stop_ids=every)))
    expect((len(alone.token_ids), alone.finish_reason) == (1, "stop"), "an answer that is only a stop id is wrong")


async def greedy_answers_are_the_likeliest_tokens(bench: Bench) -> None:
    [request] = bench.requests(1, Sampling(max_new_tokens=12, temperature=0.0))
    [greedy] = await bench.answers([request])
    rows = zip(bench.logits(request, greedy), greedy.token_ids, strict=True)
    below = [float(logits.max() - logits[token]) for logits, token in rows]
    expect(max(below) <= bench.tolerance, "a greedy answer has a token that is not the most likely one")
    for cut in (Sampling(max_new_tokens=12, top_k=1), Sampling(max_new_tokens=12, top_p=1e-6)):
        [answer] = await bench.answers([replace(request, sampling=cut)])
        expect(answer.token_ids == greedy.token_ids, f"{cut} gives different tokens from a greedy answer")
        expect_near(answer.logprobs, [0.0] * len(answer.logprobs), 1e-5, "logprobs of the only remaining token")


async def a_prefix_group_changes_no_tokens(bench: Bench) -> None:
    grouped = bench.requests(8, group="contract/group")
    expected = await bench.texts([replace(request, prefix_group=None) for request in grouped])
    expect(await bench.texts(grouped) == expected, "a prefix group changes the tokens")
    expect(await bench.texts(grouped) == expected, "a second prefix group of the same name changes the tokens")


async def a_prefix_group_may_arrive_bit_by_bit(bench: Bench) -> None:
    grouped = bench.requests(4, group="contract/late")
    expected = await bench.texts([replace(request, prefix_group=None) for request in grouped])
    early = asyncio.create_task(bench.texts(grouped[:2]))
    await asyncio.sleep(0.01)
    late = await bench.texts(grouped[2:])
    expect([*await early, *late] == expected, "requests that join a group later get different tokens")


async def a_large_group_is_served(bench: Bench) -> None:
    found = await bench.texts(bench.requests(40, Sampling(max_new_tokens=4), group="contract/large"))
    expect([len(ids) for ids in found] == [4] * 40, "not all rollouts of a group of 40 have 4 tokens")


async def on_tokens_receives_the_whole_answer(bench: Bench) -> None:
    asked = bench.requests(3)
    heard: list[list[int]] = [[] for _ in asked]
    calls = (bench.engine.generate(request, ids.extend) for request, ids in zip(asked, heard, strict=True))
    for answer, ids in zip(await asyncio.gather(*calls), heard, strict=True):
        expect(tuple(ids) == answer.token_ids, f"on_tokens got {len(ids)} of {len(answer.token_ids)} tokens, or others")


async def cancelling_a_request_leaves_the_others_as_they_are(bench: Bench) -> None:
    asked = bench.requests(4, group="contract/cancel") + bench.requests(4)
    expected = await bench.texts(asked)
    tasks = [asyncio.ensure_future(bench.engine.generate(request)) for request in asked]
    endless = [asyncio.ensure_future(bench.engine.generate(request)) for request in bench.requests(3, long_of(bench))]
    await asyncio.sleep(0.02)
    for task in (tasks[1], *endless):
        task.cancel()
    outcomes = await asyncio.gather(*tasks, *endless, return_exceptions=True)
    for outcome in outcomes[len(tasks) :]:
        expect(isinstance(outcome, asyncio.CancelledError), "a cancelled call did not end with CancelledError")
    bench.engine.release("contract/cancel")
    kept = [k for k in range(len(asked)) if k != 1]
    found = [outcome.token_ids if isinstance(outcome, Answer) else None for outcome in outcomes]
    expect([found[k] for k in kept] == [expected[k] for k in kept], "cancelling a request changed the others' tokens")
    expect(await bench.texts(asked) == expected, "after a cancelled request the engine gives different tokens")


def long_of(bench: Bench) -> Sampling:
    """Answers as long as the context allows, at most 120 tokens."""
    longest = max(len(request.token_ids) for request in bench.requests(4))
    return Sampling(max_new_tokens=min(120, bench.policy.max_context_tokens - longest))


async def an_unknown_name_may_be_released(bench: Bench) -> None:
    bench.engine.release("contract/nobody")
    expect(len(await bench.texts(bench.requests(1))) == 1, "there is no answer after release of an unknown name")


async def a_request_that_does_not_fit_is_refused_and_no_other_suffers(bench: Bench) -> None:
    room = bench.policy.max_context_tokens - 8
    ids = (bench.ids("What is 12 + 13?") * room)[: room + 1]
    asked = bench.requests(2)
    expected = await bench.texts(asked)
    calls = [*asked, Request(ids, Sampling(max_new_tokens=8), 5)]
    *others, refused = await asyncio.gather(*(bench.engine.generate(each) for each in calls), return_exceptions=True)
    expect(isinstance(refused, InputError), f"a prompt that is too long gave {refused!r}, expected an InputError")
    expect([getattr(each, "token_ids", None) for each in others] == expected, "the tokens of other requests changed")


async def weights_may_be_loaded_while_rollouts_are_written(bench: Bench) -> None:
    """Versions never decrease within an answer, and later requests use the new version."""
    before = bench.version
    writing = [asyncio.ensure_future(bench.engine.generate(each)) for each in bench.requests(6, long_of(bench))]
    await asyncio.sleep(0.02)
    await bench.load()
    expect(bench.engine.policy_version == bench.version, f"policy_version is {bench.engine.policy_version}")
    later = await bench.answers(bench.requests(2))
    for answer in await asyncio.gather(*writing):
        first, last = answer.policy_versions
        expect(before <= first <= last <= bench.version, f"policy_versions are {answer.policy_versions}")
        if bench.engine.traits.keeps_weights:
            expect(first == last, f"policy_versions are {answer.policy_versions}, but the engine keeps weights")
    for answer in later:
        expect(answer.policy_versions == (bench.version,) * 2, f"policy_versions are {answer.policy_versions}")


CHECKS: list[Check] = [thing for thing in list(vars().values()) if inspect.iscoroutinefunction(thing)]
"""Every rule above, in this order: a rule is a coroutine function of this file."""


async def check_engine(engine: Any, policy: Policy) -> None:
    """Runs every check. Raises `ContractError` with all rules that the engine breaks, by the names of the checks."""
    bench, broken = Bench(engine, policy), []
    await bench.load()
    for check in CHECKS:
        try:
            await asyncio.wait_for(check(bench), MAX_S)
        except Exception as error:
            reason = f"not done after {MAX_S:g} s" if isinstance(error, TimeoutError) else str(error)
            broken.append(f"{check.__name__}: {reason or type(error).__name__}")
    if broken:
        raise ContractError(f"{type(engine).__name__} breaks {len(broken)} rules:\n" + "\n".join(broken))
