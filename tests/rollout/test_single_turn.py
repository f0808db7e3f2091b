import asyncio

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace, Sequence, Split
from transformers import PreTrainedTokenizerFast

from podium.errors import EngineError, InputError
from podium.records import Group, Prompt, ids_digest
from podium.rollout.single_turn import SingleTurn, _single_ids, rollout_seed
from tests.fakes import FakeEngine, FakeTokenizer

PROMPTS = [Prompt(ordinal, (65, 66)) for ordinal in (3, 5)]


def groups(reply, **options) -> tuple[list[Group], FakeEngine]:
    engine = FakeEngine(reply)
    stage = SingleTurn(engine, FakeTokenizer(), (2,), 128, 3, 11, **options)

    async def run() -> list[Group]:
        return [group async for group in stage.start(PROMPTS)]

    return asyncio.run(run()), engine


def test_groups_carry_what_the_engine_sampled() -> None:
    made, _ = groups(lambda request, k: ((72, 105, 2)[: k + 1], (-0.1, -0.2, -0.3)[: k + 1]))
    assert [group.prompt.ordinal for group in made] == [3, 5]
    last = made[0].rollouts[2]
    assert last.token_ids == (72, 105, 2)
    assert last.rollout_logprobs == (-0.1, -0.2, -0.3)
    assert last.loss_mask == (1, 1, 1)
    assert last.text == "Hi\x02"
    assert (last.sample_index, last.policy_version_min, last.policy_version_max) == (2, 0, 0)
    assert last.digest == ids_digest((72, 105, 2))


def test_seeds_depend_on_run_seed_purpose_ordinal_and_index_only() -> None:
    _, engine = groups(lambda request, k: ((72,), (-0.1,)))
    assert engine.requests[0].seeds == tuple(rollout_seed(11, "train", 3, k) for k in range(3))
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
        groups(lambda request, k: (ids, logprobs), max_new_tokens=8)


def test_an_answer_that_is_only_the_stop_token_is_legal() -> None:
    made, _ = groups(lambda request, k: ((2,), (-0.1,)))
    assert made[0].rollouts[0].token_ids == (2,)


def test_a_stop_text_must_be_one_token() -> None:
    with pytest.raises(InputError, match="'ab' is 2 tokens"):
        groups(lambda request, k: ((72,), (-0.1,)), stop=["ab"])


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


class Scripted(FakeEngine):
    """Plays what a script says of each call: which answers come, in which order, and how it ends."""

    def __init__(self, *calls) -> None:
        super().__init__(lambda request, k: ((72,), (-0.1,)))
        self._calls = iter(calls)

    async def generate(self, requests, sampling):
        script = next(self._calls)
        answers = {answer.key: answer async for answer in super().generate(requests, sampling)}
        for key in script:
            if isinstance(key, Exception):
                raise key
            yield answers[key]


def scripted(*calls, **options) -> tuple[list[int], list[list[int]]]:
    """Ordinals of the groups, and of the requests of each call."""
    engine = Scripted(*calls)
    stage = SingleTurn(engine, FakeTokenizer(), (2,), 128, 3, 11, **options)

    async def run() -> list[int]:
        return [group.prompt.ordinal async for group in stage.start(PROMPTS)]

    return asyncio.run(run()), engine.requests


GONE = EngineError("gone")


def test_an_engine_that_breaks_off_is_asked_again_for_what_it_owes() -> None:
    found, requests = scripted([3, GONE], [5])
    assert found == [3, 5]
    assert [request.key for request in requests] == [3, 5, 5]
    assert requests[1].seeds == requests[2].seeds  # so the same tokens


def test_an_engine_that_leaves_prompts_unanswered_is_asked_again_and_then_given_up() -> None:
    assert scripted([3], [], [5])[0] == [3, 5]
    with pytest.raises(EngineError, match="left 1 prompts unanswered, such as 5"):
        scripted([3], [], [])


def test_an_engine_that_breaks_off_too_often_is_given_up() -> None:
    with pytest.raises(EngineError, match="gone"):
        scripted([GONE], max_retries=0)


def test_an_answer_that_comes_twice_counts_once() -> None:
    assert scripted([3, 3, 5, 3])[0] == [3, 5]


def test_a_prompt_that_cannot_be_answered_comes_without_rollouts_in_its_place() -> None:
    made, engine = groups(lambda request, k: ((72,), (float("nan") if request.key == 3 else -0.1,)), max_retries=1)
    assert [(group.prompt.ordinal, len(group.rollouts), group.num_retries) for group in made] == [(3, 0, 1), (5, 3, 0)]
    assert [request.key for request in engine.requests] == [3, 3, 5]
