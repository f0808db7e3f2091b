from collections.abc import Callable
from functools import partial

import pytest

from podium.advantage.build import assign_advantages
from podium.advantage.grpo import grpo
from podium.advantage.rloo import rloo
from podium.pack import pack
from tests.builders import make_group

# rewards 1, 0, 0, 0.2: mean 0.3, so 0.7, −0.3, −0.3, −0.1; rloo's are 4/3 of these
REWARDS = (1.0, 0.0, 0.0, 0.2)
DIFFERENCES = {"grpo": (0.7, -0.3, -0.3, -0.1), "rloo": (14 / 15, -0.4, -0.4, -2 / 15)}
FUNCTIONS: dict[str, Callable[..., list[float]]] = {"grpo": partial(grpo, std="none"), "rloo": rloo}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_by_default_nothing_is_cut(name: str) -> None:
    assert FUNCTIONS[name](REWARDS) == pytest.approx(DIFFERENCES[name], abs=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_clip_cuts_on_both_sides(name: str) -> None:
    last = DIFFERENCES[name][3]
    assert FUNCTIONS[name](REWARDS, clip=0.25) == pytest.approx((0.25, -0.25, -0.25, last), abs=1e-12)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_lower_bound_of_0_leaves_the_answers_that_beat_their_group(name: str) -> None:
    first = DIFFERENCES[name][0]
    assert FUNCTIONS[name](REWARDS, clip=(0.0, 9.0)) == pytest.approx((first, 0.0, 0.0, 0.0), abs=1e-12)
    assert FUNCTIONS[name](REWARDS, clip=(0.0, 0.25)) == [0.25, 0.0, 0.0, 0.0]


def test_the_clip_is_of_the_advantage_and_not_of_the_difference() -> None:
    # rewards 1, 0, 0, 0: mean 1/4, population deviation √3/4, so √3 = 1.7320508 and −1/√3 = −0.5773503
    assert grpo([1.0, 0.0, 0.0, 0.0], eps=0.0, clip=1.5) == pytest.approx([1.5] + [-0.5773503] * 3, abs=1e-7)


def test_rollouts_whose_advantage_became_0_stay_in_the_batch_and_its_denominators() -> None:
    [group] = assign_advantages([make_group(REWARDS)], partial(grpo, std="none", clip=(0.0, 9.0)))
    [batch] = pack([group], max_tokens_per_batch=99, temperature=1.0)
    # four answers of three tokens after a prompt of three
    assert (batch.num_rollouts, batch.num_loss_tokens) == (4, 12)
    assert batch.advantages.tolist() == pytest.approx([0.0] * 3 + [0.7] * 3 + [0.0] * 18, abs=1e-6)
