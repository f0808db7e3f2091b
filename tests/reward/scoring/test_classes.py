import asyncio
from pathlib import Path
from typing import Any

import pytest

from podium import register_reward
from podium.errors import InputError, RewardContractError
from podium.records import Group
from podium.reward.scoring.stage import NamedReward, Scoring, bound_reward, declared_range, style_of
from podium.settings.lookup import find
from tests.builders import make_prompt, make_rollout
from tests.reward.scoring.test_stage import score


@register_reward("length")
class Length:
    min_value, max_value, weight = 2.0, 6.0, 0.5
    made = 0

    def __init__(self, *, unit: int = 1) -> None:
        type(self).made += 1
        self.unit = unit

    def __call__(self, prompt: Any, rollout: Any) -> Any:
        return None if rollout.text == "?" else len(rollout.text) / self.unit


@register_reward("group_length")
class GroupLength(Length):
    def __call__(self, prompt: Any, rollouts: Any) -> Any:
        return [super(GroupLength, self).__call__(prompt, rollout) for rollout in rollouts]


@register_reward("later_length")
class LaterLength(Length):
    async def __call__(self, prompt: Any, rollout: Any) -> Any:
        await asyncio.sleep(0)
        return super().__call__(prompt, rollout)


@register_reward("later_group_length")
class LaterGroupLength(GroupLength):
    async def __call__(self, prompt: Any, rollouts: Any) -> Any:
        await asyncio.sleep(0)
        return super().__call__(prompt, rollouts)


CLASSES = {Length: "each", GroupLength: "batched", LaterLength: "together", LaterGroupLength: "batched"}


def scored(cls: type, *texts: str, **options: Any) -> Group:
    reward = NamedReward("it", bound_reward(cls, options))
    (group,) = score(
        Scoring({"it": reward}, ["it"], 1, max_failed_share=1.0),
        Group(make_prompt(), tuple(make_rollout(text) for text in texts)),
    )
    return group


@pytest.mark.parametrize("cls", CLASSES)
def test_values_are_mapped_from_the_class_s_range_to_0_and_1(cls: type) -> None:
    group = scored(cls, "aa", "aaa", "aaaaaa", "?")
    # (2 − 2) / 4, (3 − 2) / 4, (6 − 2) / 4; None stays None
    assert group.rewards == (0.0, 0.25, 1.0, None)
    assert group.correct == (False, False, True, None)
    assert group.reward_failures == {}


@pytest.mark.parametrize("cls", CLASSES)
def test_a_value_outside_the_class_s_own_range_is_a_breach_in_its_own_numbers(cls: type) -> None:
    with pytest.raises(RewardContractError, match=r"returned 7.0, outside its declared range \[2.0, 6.0\]"):
        scored(cls, "aaaaaaa")
    with pytest.raises(RewardContractError, match=r"'.*length' on prompt 0"):
        scored(cls, "a")


@pytest.mark.parametrize(("cls", "style"), CLASSES.items())
def test_how_it_is_called_is_read_from_its_call(cls: type, style: str) -> None:
    assert style_of(bound_reward(cls, {})) == style
    assert declared_range(bound_reward(cls, {})) == (0.0, 1.0)


def test_the_options_go_to_the_constructor_and_an_instance_is_made_once() -> None:
    before = Length.made
    assert scored(Length, "aaaa", "aaaaaaaaaaaa", unit=2).rewards == (0.0, 1.0)
    assert Length.made == before + 1


def test_binding_options_makes_no_instance() -> None:
    """The driver of a run with workers must not load what only they need."""
    before = Length.made
    bound_reward(Length, {"unit": 2})
    assert Length.made == before


@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"min_value": 0.0},
        {"max_value": 1.0},
        {"min_value": 1.0, "max_value": 1.0},
        {"min_value": 0.0, "max_value": float("inf")},
        {"min_value": 2.0, "max_value": 1.0},
    ],
)
def test_a_class_must_say_what_it_can_return(bounds: dict[str, float]) -> None:
    with pytest.raises(InputError, match=r"class Bad: min_value = .* needs both"):
        register_reward("bad")(type("Bad", (), bounds))


def test_a_registered_class_is_found_by_either_name(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "import podium\n"
        "@podium.register_reward('brief')\n"
        "class Brevity:\n"
        "    min_value, max_value = 0, 1\n"
        "    def __call__(self, prompt, rollout): return 1\n"
    )
    assert find("reward", f"{path}:brief") is find("reward", f"{path}:Brevity")
    with pytest.raises(InputError, match="has no such function or class"):
        find("reward", f"{path}:brevity")
