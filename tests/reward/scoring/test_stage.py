import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podium.advantage.build import assign_advantages
from podium.advantage.grpo import grpo
from podium.errors import RewardContractError, RewardFailedError
from podium.filter import filter_groups
from podium.records import Group
from podium.reward.scoring.stage import NamedReward, Scoring
from podium.reward.scoring.verifiers import declare_range
from tests.builders import make_group, make_prompt, make_rollout


def unscored(ordinal: int = 0, texts: Sequence[str] = ("a", "b"), reward: tuple[str, ...] = ()) -> Group:
    return Group(make_prompt(ordinal, reward=reward), tuple(make_rollout(text) for text in texts))


def make_scoring(
    *rewards: Callable[..., Any], weights: Sequence[float] = (), prompts_per_step: int = 1, **options: Any
) -> Scoring:
    """The rewards by the names of their functions."""
    named = [NamedReward(f.__name__, f, w) for f, w in zip(rewards, weights or [1.0] * len(rewards), strict=True)]
    return Scoring({each.name: each for each in named}, [each.name for each in named], prompts_per_step, **options)


def score(scoring: Scoring, *groups: Group, after: Sequence[Group] = ()) -> list[Group]:
    async def arriving() -> AsyncIterator[Group]:
        for group in groups:
            yield group

    async def run() -> list[Group]:
        return [group async for group in scoring.score_each(arriving(), after)]

    return asyncio.run(run())


def length(prompt: Any, rollout: Any) -> float:
    return float(len(rollout.text))


@declare_range(0.0, 1.0)
def is_a(prompt: Any, rollout: Any) -> float:
    return float(rollout.text == "a")


@declare_range(0.0, 4.0)
def up_to_4(prompt: Any, rollout: Any) -> float:
    return min(4.0, len(rollout.text))


def line_of(function: Any, number: int) -> str:
    """That line after the function's first, as failures name it."""
    return f"{Path(__file__).name}:{function.__code__.co_firstlineno + number}"


def raises_on_b(prompt: Any, rollout: Any) -> float:
    if rollout.text == "b":
        raise KeyError("no b")
    return 1.0


def abstains_on_b(prompt: Any, rollout: Any) -> float | None:
    return None if rollout.text == "b" else 1.0


def test_the_reward_is_the_weighted_sum_and_the_parts_are_unweighted() -> None:
    (group,) = score(make_scoring(is_a, length, weights=(2.0, -0.5)), unscored(texts=("a", "bbb")))
    # "a": 2·1 − 0.5·1 = 1.5;  "bbb": 2·0 − 0.5·3 = −1.5
    assert group.rewards == (1.5, -1.5)
    assert group.reward_parts == ({"is_a": 1.0, "length": 1.0}, {"is_a": 0.0, "length": 3.0})
    assert group.reward_failures == {}


def test_a_reward_that_raises_abstains_and_is_counted_and_never_becomes_0() -> None:
    (group,) = score(make_scoring(raises_on_b, max_failed_share=1.0), unscored(texts=("a", "b", "b")))
    assert group.rewards == (1.0, None, None)
    assert group.reward_parts[1] == {"raises_on_b": None}
    assert group.correct == (None, None, None)
    assert group.reward_failures == {f"raises_on_b: KeyError at {line_of(raises_on_b, 2)}: 'no b'": 2}


def test_a_reward_that_abstains_is_not_a_failure() -> None:
    (group,) = score(make_scoring(abstains_on_b, max_failed_share=1.0), unscored(texts=("a", "b")))
    assert group.rewards == (1.0, None)
    assert group.reward_failures == {}


@pytest.mark.parametrize("reward", [raises_on_b, abstains_on_b])
def test_a_rollout_is_not_judged_by_a_part_of_its_rewards(reward: Any) -> None:
    """Counting the others alone would make a failed reward a 0."""
    (group,) = score(make_scoring(reward, length, weights=(1.0, 0.25), max_failed_share=1.0), unscored())
    assert group.rewards == (1.25, None)  # "a": 1 + 0.25·1


def test_a_reward_cannot_end_the_run_by_exiting() -> None:
    def leaving(prompt: Any, rollout: Any) -> float:
        raise SystemExit(0)

    (group,) = score(make_scoring(leaving, max_failed_share=1.0), unscored())
    assert group.rewards == (None, None)
    assert sum(group.reward_failures.values()) == 2


def test_an_interrupt_inside_a_reward_is_not_swallowed() -> None:
    def interrupted(prompt: Any, rollout: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(make_scoring(interrupted), unscored())


@pytest.mark.parametrize("reward", [raises_on_b, abstains_on_b])
def test_above_the_allowed_share_of_a_step_the_run_stops(reward: Callable[..., Any]) -> None:
    groups = [unscored(0, ("a",) * 9 + ("b",)), unscored(1, ("a",) * 9 + ("b",))]
    # 2 of 20 calls are 0.1: just allowed by 0.1, too many for 0.09
    assert len(score(make_scoring(reward, prompts_per_step=2, max_failed_share=0.1), *groups)) == 2
    with pytest.raises(RewardFailedError, match=r"2 of 20 reward calls gave no number"):
        score(make_scoring(reward, prompts_per_step=2, max_failed_share=0.09), *groups)


def test_the_message_names_the_limit_the_reason_and_how_often() -> None:
    with pytest.raises(RewardFailedError) as caught:
        score(make_scoring(raises_on_b, max_failed_share=0.5), unscored(texts=("a", "b", "b")))
    told = f"raises_on_b: KeyError at {line_of(raises_on_b, 2)}: 'no b' (×2)"
    assert f"scoring.max_failed_share = 0.5: {told}" in str(caught.value)
    with pytest.raises(RewardFailedError, match="they abstained"):
        score(make_scoring(abstains_on_b), unscored())


def test_the_share_is_of_one_step_and_not_of_the_run() -> None:
    good, bad = ("a",) * 10, ("a",) * 8 + ("b",) * 2
    allowed = make_scoring(raises_on_b, prompts_per_step=2, max_failed_share=0.1)
    # each step has 2 failed of 20
    assert len(score(allowed, unscored(0, good), unscored(1, bad), unscored(2, bad), unscored(3, good))) == 4
    with pytest.raises(RewardFailedError, match="4 of 20"):
        score(allowed, unscored(0, good), unscored(1, good), unscored(2, bad), unscored(3, bad))


def test_a_last_step_that_is_smaller_is_checked_too() -> None:
    scoring = make_scoring(raises_on_b, prompts_per_step=2)
    groups = [unscored(0, ("a",)), unscored(1, ("a",)), unscored(2, ("b",))]
    with pytest.raises(RewardFailedError, match="1 of 1 reward calls"):
        score(scoring, *groups)


def test_the_last_group_of_a_bad_step_is_never_handed_on() -> None:
    handed_on = []

    async def run() -> None:
        async def arriving() -> AsyncIterator[Group]:
            for ordinal in range(4):
                yield unscored(ordinal, ("b",) if ordinal == 2 else ("a",))

        async for group in make_scoring(raises_on_b, prompts_per_step=2).score_each(arriving()):
            handed_on.append(group.prompt.ordinal)

    with pytest.raises(RewardFailedError):
        asyncio.run(run())
    assert handed_on == [0, 1, 2]


def test_the_share_of_a_refill_is_taken_together_with_what_the_step_has() -> None:
    scoring = make_scoring(raises_on_b, prompts_per_step=2, max_failed_share=0.1)
    first = score(scoring, unscored(0, ("a",) * 10), unscored(1, ("a",) * 10))
    few = [unscored(2, ("a", "a", "b")), unscored(3, ("a", "a", "a"))]
    assert len(score(scoring, *few, after=first)) == 2  # 1 of 23, then 1 of 26
    with pytest.raises(RewardFailedError, match="1 of 6"):
        score(scoring, *few)
    with pytest.raises(RewardFailedError, match="3 of 23"):
        score(scoring, unscored(2, ("b", "b", "b")), after=first)


def test_a_group_that_makes_a_refilled_steps_share_too_large_is_never_handed_on() -> None:
    """It may be the one that fills the step."""
    scoring = make_scoring(raises_on_b, prompts_per_step=2)
    first = score(scoring, unscored(0, ("a",)), unscored(1, ("a",)))
    handed_on = []

    async def run() -> None:
        async def arriving() -> AsyncIterator[Group]:
            yield unscored(2, ("a",))
            yield unscored(3, ("b",))

        async for group in scoring.score_each(arriving(), first):
            handed_on.append(group.prompt.ordinal)

    with pytest.raises(RewardFailedError, match="1 of 4"):
        asyncio.run(run())
    assert handed_on == [2]


def returns_text(prompt: Any, rollout: Any) -> str:
    return "1.0"


async def returns_text_later(prompt: Any, rollout: Any) -> str:
    await asyncio.sleep(0.001)
    return "1.0"


@pytest.mark.parametrize("reward", [returns_text, returns_text_later])
def test_a_breach_of_contract_stops_the_run_whatever_share_is_allowed(reward: Callable[..., Any]) -> None:
    with pytest.raises(RewardContractError, match=rf"reward '{reward.__name__}' on prompt 3 .* returned '1.0'"):
        score(make_scoring(reward, max_failed_share=1.0), unscored(3))


def test_a_breach_in_several_groups_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RewardContractError):
        score(make_scoring(returns_text), *[unscored(i) for i in range(4)])
    gc.collect()  # a task whose error nobody asked for would log a traceback now
    assert caplog.records == []


def test_a_reward_may_be_a_coroutine() -> None:
    async def later(prompt: Any, rollout: Any) -> float:
        await asyncio.sleep(0)
        return length(prompt, rollout)

    (group,) = score(make_scoring(later), unscored(texts=("a", "bbb")))
    assert group.rewards == (1.0, 3.0)


def test_a_coroutine_that_raises_abstains_and_is_counted() -> None:
    async def fails_later(prompt: Any, rollout: Any) -> float:
        await asyncio.sleep(0)
        raise TimeoutError("judge is away")

    (group,) = score(make_scoring(fails_later, max_failed_share=1.0), unscored())
    assert group.rewards == (None, None)
    assert group.reward_failures == {f"fails_later: TimeoutError at {line_of(fails_later, 2)}: judge is away": 2}


def test_of_a_reward_that_a_library_lets_down_its_own_line_is_told() -> None:
    def parses(prompt: Any, rollout: Any) -> float:
        return json.loads("{")["score"]

    (group,) = score(make_scoring(parses, max_failed_share=1.0), unscored(texts=("a",)))
    (told,) = group.reward_failures
    assert told.startswith(f"parses: JSONDecodeError at {line_of(parses, 1)}: ")


def test_an_error_without_a_trace_is_told_without_its_place() -> None:
    class Untraceable(Exception):
        @property
        def __traceback__(self) -> Any:
            raise RuntimeError("no trace")

    def fails(prompt: Any, rollout: Any) -> float:
        raise Untraceable("gone")

    (group,) = score(make_scoring(fails, max_failed_share=1.0), unscored(texts=("a",)))
    assert group.reward_failures == {"fails: Untraceable: gone": 1}


def test_a_reward_whose_second_argument_is_called_rollouts_is_given_the_whole_group() -> None:
    @declare_range(0.0, 1.0)
    def longest(prompt: Any, rollouts: Any) -> list[float]:
        return [float(len(each.text) == max(len(one.text) for one in rollouts)) for each in rollouts]

    (group,) = score(make_scoring(longest), unscored(texts=("a", "bbb", "cc")))
    assert group.rewards == (0.0, 1.0, 0.0)
    assert group.correct == (False, True, False)


def test_a_batched_reward_that_raises_abstains_for_every_rollout() -> None:
    def fails(prompt: Any, rollouts: Any) -> list[float]:
        raise KeyError("x")

    (group,) = score(make_scoring(fails, max_failed_share=1.0), unscored(texts=("a", "b", "c")))
    assert group.rewards == (None, None, None)
    assert group.reward_failures == {f"fails: KeyError at {line_of(fails, 1)}: 'x'": 3}


@pytest.mark.parametrize("values", [[1.0], [1.0, 1.0, 1.0], [], 1.0, None, {0: 1.0, 1: 1.0}, "11"])
def test_a_batched_reward_returns_exactly_one_value_a_rollout(values: Any) -> None:
    def wrong(prompt: Any, rollouts: Any) -> Any:
        return values

    with pytest.raises(RewardContractError, match=r"reward 'wrong' on prompt 0 \(arithmetic\) returned "):
        score(make_scoring(wrong), unscored(texts=("a", "b")))


def test_a_group_is_scored_while_later_ones_are_still_being_written() -> None:
    async def run() -> list[int]:
        scored = asyncio.Event()

        async def reward(prompt: Any, rollout: Any) -> float:
            scored.set()
            return 1.0

        async def arriving() -> AsyncIterator[Group]:
            yield unscored(0)
            await asyncio.wait_for(scored.wait(), 5)  # the second is not written before the first is scored
            yield unscored(1)

        return [group.prompt.ordinal async for group in make_scoring(reward).score_each(arriving())]

    assert asyncio.run(run()) == [0, 1]


def test_groups_are_scored_beside_each_other_and_leave_in_the_order_of_arrival() -> None:
    async def run() -> tuple[list[int], list[int]]:
        second_is_scored, third_arrives, finished = asyncio.Event(), asyncio.Event(), []

        async def reward(prompt: Any, rollout: Any) -> float:
            if prompt.ordinal == 0:
                await asyncio.wait_for(third_arrives.wait(), 5)  # scored in turn, this would wait for ever
            finished.append(prompt.ordinal)
            if prompt.ordinal == 1:
                second_is_scored.set()
            return 1.0

        async def arriving() -> AsyncIterator[Group]:
            yield unscored(0, ("a",))
            yield unscored(1, ("a",))
            await second_is_scored.wait()
            third_arrives.set()
            yield unscored(2, ("a",))

        left = [group.prompt.ordinal async for group in make_scoring(reward).score_each(arriving())]
        return finished, left

    finished, left = asyncio.run(run())
    assert finished[0] == 1
    assert left == [0, 1, 2]


def test_a_row_is_scored_by_the_rewards_that_it_names() -> None:
    scoring = make_scoring(is_a, length, up_to_4)
    scoring = Scoring(scoring.by_name, ["is_a"], 1)
    default, named = score(scoring, unscored(0), unscored(1, ("aaaaa",), reward=("length", "up_to_4")))
    assert default.reward_parts[0] == {"is_a": 1.0}
    assert named.reward_parts == ({"length": 5.0, "up_to_4": 4.0},)
    assert named.rewards == (9.0,)


@pytest.mark.parametrize(
    ("rewards", "weights", "expected"),
    [
        ((is_a,), (1.0,), (True, False)),
        ((is_a,), (0.3,), (True, False)),
        # highest 1 + 4 = 5; "a" has 1 + 1, "bbbb" has 0 + 4
        ((is_a, up_to_4), (1.0, 1.0), (False, False)),
        # highest 0 · … : with a negative weight the smallest value is the best, −1·0; "bbbb" has it
        ((is_a,), (-1.0,), (False, True)),
        # without a declared range there is no highest
        ((length,), (1.0,), (None, None)),
        ((is_a, length), (1.0, 1.0), (None, None)),
        ((is_a, length), (1.0, -1.0), (None, None)),
        # a reward that is only watched, weight 0, has no say
        ((is_a, length), (1.0, 0.0), (True, False)),
    ],
)
def test_correct_is_a_reward_of_the_highest_possible_value(
    rewards: tuple[Callable[..., Any], ...], weights: tuple[float, ...], expected: tuple[bool | None, ...]
) -> None:
    (group,) = score(make_scoring(*rewards, weights=weights), unscored(texts=("a", "bbbb")))
    assert group.correct == expected


def cut(ordinal: int = 0, texts: Sequence[str] = ("a", "b")) -> Group:
    """The first rollout was cut at its longest."""
    first, *others = (make_rollout(text) for text in texts)
    return Group(make_prompt(ordinal), (replace(first, finish_reason="length"), *others))


def test_the_penalty_takes_the_place_of_the_weighted_sum_and_the_parts_stay() -> None:
    scoring = make_scoring(is_a, up_to_4, weights=(2.0, 0.5), non_stop_penalty=-1.5)
    (group,) = score(scoring, cut(texts=("a", "bbb")))
    # without it "a" would have 2·1 + 0.5·1 = 2.5;  "bbb" keeps 2·0 + 0.5·3
    assert group.rewards == (-1.5, 1.5)
    assert group.reward_parts == ({"is_a": 1.0, "up_to_4": 1.0}, {"is_a": 0.0, "up_to_4": 3.0})


def test_without_a_penalty_a_cut_rollout_keeps_its_reward() -> None:
    (group,) = score(make_scoring(is_a), cut())
    assert (group.rewards, group.correct) == ((1.0, 0.0), (True, False))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 7.0])
def test_a_penalised_rollout_is_never_correct_even_if_the_penalty_is_the_highest_reward(penalty: float) -> None:
    (group,) = score(make_scoring(is_a, non_stop_penalty=penalty), cut(texts=("a", "a")))
    assert (group.rewards, group.correct) == ((penalty, 1.0), (False, True))


def test_whether_a_penalised_rollout_is_correct_stays_unknown_where_no_highest_reward_is_declared() -> None:
    (group,) = score(make_scoring(length, non_stop_penalty=-1.0), cut())
    assert (group.rewards, group.correct) == ((-1.0, 1.0), (None, None))


def test_a_cut_rollout_without_a_reward_is_not_penalised() -> None:
    (group,) = score(make_scoring(abstains_on_b, max_failed_share=1.0, non_stop_penalty=-1.0), cut(texts=("b", "a")))
    assert (group.rewards, group.correct) == ((None, 1.0), (None, None))


def test_only_rollouts_cut_at_their_longest_are_penalised() -> None:
    aborted = replace(make_rollout("a"), finish_reason="abort")
    (group,) = score(make_scoring(is_a, non_stop_penalty=-1.0), Group(make_prompt(), (aborted, make_rollout("b"))))
    assert group.rewards == (1.0, 0.0)


def test_evaluation_penalises_as_training_does() -> None:
    (group,) = score(make_scoring(is_a, non_stop_penalty=-1.0).for_evaluation(), cut())
    assert (group.rewards, group.correct) == ((-1.0, 0.0), (False, False))


def test_a_masked_rollout_still_lowers_the_baseline_by_its_penalty() -> None:
    """Penalty and mask together: the others gain, the cut one is not trained."""
    (group,) = score(make_scoring(is_a, non_stop_penalty=-1.0), cut(texts=("a", "a", "b")))
    [credited] = assign_advantages([group], lambda rewards: grpo(rewards, std="none"))
    [masked] = filter_groups([credited], masks_truncated=True)
    # rewards −1, 1, 0: mean 0; without the penalty 1, 1, 0 would leave the second with 1/3 only
    assert masked.advantages == pytest.approx((-1.0, 1.0, 0.0), abs=1e-12)
    assert [sum(rollout.loss_mask) for rollout in masked.rollouts] == [0, 3, 3]


def test_scoring_adds_to_a_group_and_changes_nothing_else() -> None:
    before = unscored(5, ("a", "b"))
    (after,) = score(make_scoring(is_a), before)
    assert (after.prompt, after.rollouts, after.advantages) == (before.prompt, before.rollouts, ())
    assert after.scoring_s >= 0


def test_a_group_has_signal_only_if_two_rewards_differ() -> None:
    assert make_group((0.2, 1.2)).has_signal
    assert not make_group((0.2, 0.2)).has_signal
    assert not make_group((0.2, None)).has_signal
    assert not make_group((None, None)).has_signal
    assert make_group((0.2, None, 0.3)).has_signal


@pytest.mark.parametrize(
    ("correct", "expected"),
    [
        ((True, False, True, True), 0.75),
        ((True, None, False), 0.5),  # the one without a reward counts nowhere
        ((True, None, None), 0.0),  # a single rollout says too little
        ((None, None), 0.0),
        ((), 0.0),
    ],
)
def test_the_pass_rate_is_the_share_of_correct_rollouts_among_the_scored(
    correct: tuple[bool | None, ...], expected: float
) -> None:
    assert make_group((0.0,) * len(correct), correct=correct).pass_rate == expected


def test_rewards_whose_highest_value_is_not_known_are_named() -> None:
    scoring = make_scoring(is_a, length, up_to_4, weights=(1.0, 1.0, -1.0))
    assert scoring.without_highest(()) == ["length"]
    assert scoring.without_highest(("is_a", "up_to_4")) == []
    assert make_scoring(is_a, length, weights=(1.0, 0.0)).without_highest(()) == []
    assert make_scoring(is_a, length, weights=(1.0, -1.0)).without_highest(()) == ["length"]


def test_the_share_of_an_evaluation_is_taken_over_all_of_it() -> None:
    """One failure in ten prompts is a tenth, not one of the first two."""

    def fails_once(prompt: Any, rollout: Any) -> float | None:
        return None if (prompt.ordinal, rollout.text) == (0, "a") else 1.0

    scoring = make_scoring(fails_once, prompts_per_step=1, max_failed_share=0.1)
    groups = [unscored(ordinal=ordinal) for ordinal in range(10)]
    with pytest.raises(RewardFailedError):
        score(scoring, *groups)
    assert len(score(scoring.for_evaluation(), *groups)) == 10


def test_groups_are_scored_elsewhere_where_that_is_asked_and_in_evaluations_too() -> None:
    asked: list[int] = []

    async def elsewhere(group: Group) -> Group:
        asked.append(group.prompt.ordinal)
        return await make_scoring(is_a).score(group)

    scoring = make_scoring(is_a, prompts_per_step=2, elsewhere=elsewhere)
    assert [group.rewards for group in score(scoring, unscored(3), unscored(4))] == [(1.0, 0.0)] * 2
    assert [group.rewards for group in score(scoring.for_evaluation(), unscored(5))] == [(1.0, 0.0)]
    assert asked == [3, 4, 5]


def test_a_group_that_nobody_could_score_abstains_and_counts_as_failed() -> None:
    scoring = make_scoring(is_a, length)

    async def elsewhere(group: Group) -> Group:
        return scoring.unscored(group, "its worker died")

    abstained = asyncio.run(elsewhere(unscored()))
    assert abstained.rewards == (None, None)
    assert abstained.reward_parts == ({"is_a": None, "length": None},) * 2
    with pytest.raises(RewardFailedError, match=r"4 of 4 reward calls gave no number.*its worker died"):
        score(make_scoring(is_a, length, elsewhere=elsewhere), unscored())
