"""Task rewards and format rewards. `a`, `b` … are the values that the rewards gave."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from podium.records import Group
from podium.reward.arithmetic import arithmetic
from podium.reward.scoring.stage import NamedReward, Scoring, is_correct, total
from podium.reward.scoring.verifiers import declare_range
from tests.builders import make_episode, make_prompt, make_rollout
from tests.reward.scoring.test_stage import score


def ranged(low: float, high: float) -> Any:
    return declare_range(low, high)(lambda prompt, rollout: 0.0)


TASK = NamedReward("task", ranged(0.0, 1.0), weight=2.0)
PENALTY = NamedReward("penalty", ranged(-1.0, 0.0))
GATE = NamedReward("gate", ranged(0.0, 1.0), format="gate")
ADDED = NamedReward("added", ranged(0.0, 0.5), weight=0.4, format="add")


@pytest.mark.parametrize(
    ("rewards", "part", "expected", "correct"),
    [
        ([TASK], {"task": 1.0}, 2.0, True),
        ([TASK], {"task": 0.9}, 1.8, False),
        # the gate's own value is no part of the sum
        ([TASK, GATE], {"task": 1.0, "gate": 1.0}, 2.0, True),
        ([TASK, GATE], {"task": 0.5, "gate": 1.0}, 1.0, False),
        # only its highest value opens it
        ([TASK, GATE], {"task": 1.0, "gate": 0.75}, 0.0, False),
        ([TASK, GATE], {"task": 1.0, "gate": 0.0}, 0.0, False),
        # a loss is not forgiven: 2·0 − 1 stays −1, 2·1 − 0.5 is lost
        ([TASK, PENALTY, GATE], {"task": 0.0, "penalty": -1.0, "gate": 0.0}, -1.0, False),
        ([TASK, PENALTY, GATE], {"task": 1.0, "penalty": -0.5, "gate": 0.0}, 0.0, False),
        # where the best sum is 0 itself, a closed gate is still not correct
        ([PENALTY, GATE], {"penalty": 0.0, "gate": 1.0}, 0.0, True),
        ([PENALTY, GATE], {"penalty": 0.0, "gate": 0.0}, 0.0, False),
        # 2·1 + 0.4·0.5 is the most that there is
        ([TASK, ADDED], {"task": 1.0, "added": 0.5}, 2.2, True),
        ([TASK, ADDED], {"task": 1.0, "added": 0.0}, 2.0, False),
        # the gate is for the task, not for what is added
        ([TASK, GATE, ADDED], {"task": 1.0, "gate": 0.0, "added": 0.5}, 0.2, False),
        ([TASK, GATE], {"task": 1.0, "gate": None}, None, None),
        ([TASK, GATE], {"task": None, "gate": 0.0}, None, None),
    ],
)
def test_the_reward_of_a_rollout(
    rewards: list[NamedReward],
    part: Mapping[str, float | None],
    expected: float | None,
    correct: bool | None,
) -> None:
    wanted = None if expected is None else pytest.approx(expected, abs=1e-12)
    assert total(rewards, part) == wanted
    assert is_correct(rewards, part) is correct


def test_correct_allows_for_rounding_and_no_more() -> None:
    assert is_correct([TASK], {"task": 1.0 - 1e-9})
    assert not is_correct([TASK], {"task": 1.0 - 2e-8})


def test_a_small_weight_or_range_hides_no_difference() -> None:
    task, small = NamedReward("task", ranged(0.0, 1.0), weight=1e-9), NamedReward("small", ranged(0.0, 1e-9))
    malus = NamedReward("malus", ranged(0.0, 1.0), weight=-1e-9)
    assert is_correct([task, small, malus], {"task": 1.0, "small": 1e-9, "malus": 0.0})
    for wrong in ({"task": 0.0}, {"small": 0.0}, {"malus": 1.0}):
        assert not is_correct([task, small, malus], {"task": 1.0, "small": 1e-9, "malus": 0.0} | wrong)


def is_a(prompt: Any, rollout: Any) -> float:
    return float(rollout.text.startswith("a"))


@declare_range(0.0, 1.0)
def is_short(prompt: Any, rollout: Any) -> float:
    return float(len(rollout.text) < 3)


def group(*reward: str) -> Group:
    return Group(make_prompt(0, reward=reward), (make_rollout("a"), make_rollout("aaa"), make_rollout("b")))


def scoring(weight: float = 1.0, **options: Any) -> Scoring:
    rewards = [
        NamedReward("is_a", declare_range(0.0, 1.0)(is_a), weight),
        NamedReward("other", ranged(0.0, 1.0)),
        NamedReward("is_short", is_short, format="gate"),
    ]
    return Scoring({reward.name: reward for reward in rewards}, ["is_a"], 1, **options)


def test_a_format_reward_scores_every_row_also_those_that_name_their_own() -> None:
    for names in [(), ("is_a",), ("is_a", "is_short")]:
        (scored,) = score(scoring(), group(*names))
        assert scored.rewards == (1.0, 0.0, 0.0)
        assert scored.reward_parts[1] == {"is_a": 1.0, "is_short": 0.0}
        assert scored.correct == (True, False, False)


def test_the_penalty_for_cut_rollouts_is_put_in_last_and_not_weighed() -> None:
    cut = Group(make_prompt(), (make_rollout("a", finish_reason="length"), make_rollout("a")))
    (scored,) = score(scoring(weight=10.0, non_stop_penalty=-1.0), cut)
    assert scored.rewards == (-1.0, 10.0)


def test_evaluation_weighs_as_training_does() -> None:
    (scored,) = score(scoring(weight=10.0).for_evaluation(), group("is_a"))
    assert scored.rewards == (10.0, 0.0, 0.0)


def test_one_reward_named_twice_counts_once() -> None:
    (scored,) = score(scoring(), group("is_a", "is_a"))
    assert scored.rewards == (1.0, 0.0, 0.0)


def test_an_episode_whose_environment_failed_abstains_and_the_others_are_scored() -> None:
    rollouts = (make_episode("#### 3"), make_episode(failure="step: the game broke"), make_episode("#### 4"))
    scoring = Scoring({"arithmetic": NamedReward("arithmetic", arithmetic)}, ("arithmetic",), 1)
    scored = asyncio.run(scoring.score(Group(make_prompt(), rollouts)))
    assert scored.rewards == (1.2, None, 0.2)
    assert scored.correct == (True, None, False)
    assert scored.reward_failures == {"arithmetic: step: the game broke": 1}
    assert scored.trainable == [0, 2]


def test_a_group_in_which_every_environment_failed_has_no_reward() -> None:
    scoring = Scoring({"arithmetic": NamedReward("arithmetic", arithmetic)}, ("arithmetic",), 1)
    scored = asyncio.run(scoring.score(Group(make_prompt(), (make_episode(failure="a"), make_episode(failure="b")))))
    assert scored.rewards == (None, None)
    assert not scored.has_signal
    assert scored.trainable == []
