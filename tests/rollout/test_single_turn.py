import asyncio
from dataclasses import replace

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace, Sequence, Split
from transformers import PreTrainedTokenizerFast

from podium.errors import EngineError, InputError
from podium.records import Answer, EngineTraits, Group, PrefixGroup, Prompt, Request, ids_digest
from podium.rollout.single_turn import SingleTurn, _single_ids, rollout_seed
from tests.fakes import FakeEngine, FakeTokenizer

PROMPTS = [Prompt(ordinal, (65, 66)) for ordinal in (3, 5)]
SEEDS = {rollout_seed(11, "train", ordinal, k): (ordinal, k) for ordinal in (3, 5) for k in range(3)}


def ordinal_of(request: Request) -> int:
    return SEEDS[request.seed][0]


def index_of(request: Request) -> int:
    return SEEDS[request.seed][1]


def groups(reply, **options) -> tuple[list[Group], FakeEngine]:
    engine = FakeEngine(reply)
    stage = SingleTurn(engine, FakeTokenizer(), (2,), 128, 3, 11, **options)

    async def run() -> list[Group]:
        return [group async for group in stage.start(PROMPTS)]

    return asyncio.run(run()), engine


def test_groups_carry_what_the_engine_sampled() -> None:
    def longer_each_time(request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        k = index_of(request)
        return (72, 105, 2)[: k + 1], (-0.1, -0.2, -0.3)[: k + 1]

    made, _ = groups(longer_each_time)
    assert [group.prompt.ordinal for group in made] == [3, 5]
    last = made[0].rollouts[2]
    assert last.token_ids == (72, 105, 2)
    assert last.rollout_logprobs == (-0.1, -0.2, -0.3)
    assert last.loss_mask == (1, 1, 1)
    assert last.text == "Hi\x02"
    assert (last.sample_index, last.policy_version_min, last.policy_version_max) == (2, 0, 0)
    assert last.digest == ids_digest((72, 105, 2))


def test_seeds_depend_on_run_seed_purpose_ordinal_and_index_only() -> None:
    _, engine = groups(lambda request: ((72,), (-0.1,)))
    assert [request.seed for request in engine.requests] == list(SEEDS)
    every = {rollout_seed(s, p, o, k) for s in range(3) for p in ("train", "eval") for o in range(9) for k in range(4)}
    assert len(every) == 3 * 2 * 9 * 4


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ((), ()),
        ((72, 105), (-0.1,)),
        ((72,), (float("nan"),)),
        ((72,), (0.5,)),
        ((72,), (float("-inf"),)),
        ((128,), (-0.1,)),
        ((-1,), (-0.1,)),
        ((72,) * 9, (-0.1,) * 9),
    ],
)
def test_an_answer_that_cannot_be_right_is_the_engines_failure(ids, logprobs) -> None:
    with pytest.raises(EngineError, match="prompt 3"):
        groups(lambda request: (ids, logprobs), max_new_tokens=8)


def test_an_answer_that_is_only_the_stop_token_is_legal() -> None:
    made, _ = groups(lambda request: ((2,), (-0.1,)))
    assert made[0].rollouts[0].token_ids == (2,)


def test_a_stop_text_must_be_one_token() -> None:
    with pytest.raises(InputError, match="'ab' is 2 tokens"):
        groups(lambda request: ((72,), (-0.1,)), stop=["ab"])


def test_a_stop_text_is_found_inside_an_answer_where_a_texts_first_token_has_a_space() -> None:
    """SentencePiece: `.` alone is the token `▁.`, but after a word it is `.`, which is what answers hold."""
    model = WordLevel({"<unk>": 0, "▁.": 1, ".": 2, "▁a": 3, "▁": 4, "\n": 5}, unk_token="<unk>")
    backend = Tokenizer(model)
    metaspace, words = Metaspace(prepend_scheme="first", split=False), Split(Regex("▁?[a.]|\n|▁"), "isolated")
    backend.pre_tokenizer = Sequence([metaspace, words])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.encode(".") == [1]
    assert tokenizer.encode("a.") == [3, 2]
    assert _single_ids(tokenizer, ".") == {1, 2}


def test_every_rollout_of_a_call_reaches_the_engine_in_one_turn_by_ordinal_and_index() -> None:
    most = 0

    class Counting(FakeEngine):
        async def turn(self, request: Request) -> None:
            nonlocal most
            await super().turn(request)
            most = max(most, self.num_outstanding)

    engine = Counting(lambda request: ((72,), (-0.1,)))
    asyncio.run(collected(engine, list(reversed(PROMPTS))))
    assert most == 6
    assert [SEEDS[request.seed] for request in engine.requests] == sorted(SEEDS.values())
    assert [request.prefix_group for request in engine.requests] == [
        PrefixGroup(f"train/{ordinal}", 3) for ordinal in (3, 3, 3, 5, 5, 5)
    ]


async def collected(engine: FakeEngine, prompts: list[Prompt] = PROMPTS, **options) -> list[Group]:
    stage = SingleTurn(engine, FakeTokenizer(), (2,), 128, 3, 11, **options)
    return [group async for group in stage.start(prompts)]


class Gated(FakeEngine):
    """Each rollout waits for its gate."""

    def __init__(self, keeps_order: bool) -> None:
        super().__init__(lambda request: ((72,), (-0.1,)))
        self.traits = EngineTraits(channels=("shared",), keeps_order=keeps_order)
        self.gates = {place: asyncio.Event() for place in SEEDS.values()}

    async def turn(self, request: Request) -> None:
        await self.gates[SEEDS[request.seed]].wait()

    def open(self, ordinal: int, *indices: int) -> None:
        for k in indices or range(3):
            self.gates[ordinal, k].set()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("keeps_order", "expected"), [(True, [3, 5]), (False, [5, 3])])
def test_groups_come_by_ordinal_if_the_engine_keeps_order_and_otherwise_as_they_become_whole(
    keeps_order: bool, expected: list[int]
) -> None:
    async def run() -> tuple[list[int], list[int]]:
        engine, found = Gated(keeps_order), []

        async def collect() -> None:
            async for group in SingleTurn(engine, FakeTokenizer(), (2,), 128, 3, 11).start(PROMPTS):
                found.append(group.prompt.ordinal)

        task = asyncio.create_task(collect())
        await turns()
        engine.open(5)
        engine.open(3, 0, 2)  # one rollout is missing
        await turns()
        early = list(found)
        engine.open(3)
        await task
        return early, found

    early, found = asyncio.run(run())
    assert found == expected
    assert early == ([] if keeps_order else [5])


@pytest.mark.parametrize("pause", [0, 1, 20])
def test_a_slow_reader_gets_the_groups_in_the_order_in_which_they_became_whole(pause: int) -> None:
    async def run() -> list[int]:
        engine = Gated(keeps_order=False)
        task = asyncio.create_task(collected(engine))
        await turns()
        engine.open(5)
        await turns(pause)
        engine.open(3)
        return [group.prompt.ordinal for group in await task]

    assert asyncio.run(run()) == [5, 3]


def test_closing_the_iterator_gives_up_what_is_outstanding_and_releases_unfinished_groups() -> None:
    async def run() -> FakeEngine:
        engine = Gated(keeps_order=True)
        engine.open(3)
        async for group in (iterator := SingleTurn(engine, FakeTokenizer(), (2,), 128, 3, 11).start(PROMPTS)):
            assert group.prompt.ordinal == 3
            assert engine.num_outstanding == 3
            break
        await iterator.aclose()
        return engine

    engine = asyncio.run(run())
    assert engine.num_outstanding == 0
    assert engine.released == ["train/5"]


def test_cancelling_the_caller_gives_up_what_is_outstanding() -> None:
    async def run() -> FakeEngine:
        engine = Gated(keeps_order=True)
        task = asyncio.create_task(collected(engine))
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return engine

    engine = asyncio.run(run())
    assert (engine.num_outstanding, engine.released) == (0, ["train/3", "train/5"])


class Failing(FakeEngine):
    """Fails at each rollout of a prompt as often as `failures` says."""

    def __init__(self, ordinal: int, failures: int, error: Exception | None = None) -> None:
        super().__init__(lambda request: ((72,), (-0.1,)))
        self._ordinal, self._error = ordinal, error or EngineError("gone")
        self._left = dict.fromkeys(SEEDS, failures)

    async def turn(self, request: Request) -> None:
        await super().turn(request)
        if ordinal_of(request) == self._ordinal and self._left[request.seed]:
            self._left[request.seed] -= 1
            raise self._error


def test_a_rollout_whose_call_fails_is_asked_for_again_with_its_seed_and_without_its_group() -> None:
    engine = Failing(5, 2)
    made = asyncio.run(collected(engine))
    assert [(group.prompt.ordinal, len(group.rollouts), group.num_retries) for group in made] == [(3, 3, 0), (5, 3, 0)]
    again = engine.requests[6:]
    assert [SEEDS[request.seed] for request in again] == [(5, 0), (5, 1), (5, 2)] * 2
    assert all(request.prefix_group is None for request in again)


@pytest.mark.parametrize("max_retries", [0, 2])
def test_a_rollout_whose_call_fails_too_often_ends_the_run(max_retries: int) -> None:
    engine = Failing(5, max_retries + 1)
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(collected(engine, max_retries=max_retries))
    assert engine.num_outstanding == 0


def test_a_rollout_that_fails_ends_the_run_before_earlier_prompts_are_whole() -> None:
    class Late(Failing):
        async def turn(self, request: Request) -> None:
            await super().turn(request)
            if ordinal_of(request) == 3:
                await asyncio.sleep(3600)

    engine = Late(5, 9)
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(asyncio.wait_for(collected(engine), 10))
    assert (engine.num_outstanding, engine.released) == (0, ["train/3", "train/5"])


def test_what_is_no_failure_of_the_engine_is_not_tried_again() -> None:
    engine = Failing(3, 1, InputError("too long"))
    with pytest.raises(InputError, match="too long"):
        asyncio.run(collected(engine))
    assert len(engine.requests) == 6


def test_an_engine_that_gives_a_request_up_by_itself_is_named() -> None:
    with pytest.raises(EngineError, match=r"prompt 3.* gave up a request"):
        asyncio.run(collected(Failing(3, 1, asyncio.CancelledError())))  # type: ignore[arg-type]


def test_a_prompt_with_a_rollout_that_cannot_be_written_comes_without_rollouts_in_its_place() -> None:
    def wrong_once(request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        return (72,), (float("nan") if SEEDS[request.seed] == (3, 1) else -0.1,)

    made, engine = groups(wrong_once, max_retries=1)
    assert [(group.prompt.ordinal, len(group.rollouts), group.num_retries) for group in made] == [(3, 0, 1), (5, 3, 0)]
    assert [SEEDS[request.seed] for request in engine.requests[6:]] == [(3, 1)]
    assert engine.requests[6].prefix_group is None


class Pausing(FakeEngine):
    """Pauses each rollout as often as its index says."""

    async def generate(self, request: Request, on_tokens=None) -> Answer:
        return replace(await super().generate(request, on_tokens), num_pauses=index_of(request))


def test_a_groups_pauses_are_those_of_all_its_rollouts() -> None:
    made = asyncio.run(collected(Pausing(lambda request: ((72,), (-0.1,)))))
    assert [group.num_pauses for group in made] == [0 + 1 + 2] * 2


def test_a_groups_retries_are_the_most_of_any_of_its_rollouts() -> None:
    asked: dict[int, int] = {}

    def right_at_last(request: Request) -> tuple[tuple[int, ...], tuple[float, ...]]:
        asked[request.seed] = asked.get(request.seed, -1) + 1
        needed = {(3, 0): 1, (3, 2): 2}.get(SEEDS[request.seed], 0)
        return (72,), (-0.1 if asked[request.seed] == needed else float("nan"),)

    made, _ = groups(right_at_last)
    assert [(len(group.rollouts), group.num_retries) for group in made] == [(3, 2), (3, 0)]
    assert [rollout.sample_index for rollout in made[0].rollouts] == [0, 1, 2]
