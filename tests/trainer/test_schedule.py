import pytest

from podium.trainer import rate_at


def rates(steps: int, **options) -> list[float]:
    return [
        rate_at(1.0, step, total_steps=8, **{"warmup_steps": 0, "schedule": "constant", **options})
        for step in range(steps)
    ]


def test_warm_up_rises_in_equal_parts() -> None:
    assert rates(6, warmup_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])


def test_without_warm_up_the_first_step_has_the_full_rate() -> None:
    assert rates(3) == [1, 1, 1]


def test_linear_falls_in_equal_parts_to_zero_at_the_end() -> None:
    assert rates(10, schedule="linear") == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0])


def test_cosine_is_half_way_down_in_the_middle() -> None:
    # (1 + cos(π·x))/2 at x = 0, 1/2, 1
    found = rates(9, schedule="cosine")
    assert [found[0], found[4], found[8]] == pytest.approx([1, 0.5, 0], abs=1e-12)
    assert found == sorted(found, reverse=True)


def test_the_decay_begins_where_the_warm_up_ends() -> None:
    # 8 steps, 4 of warm-up: then 1, 3/4, 2/4, 1/4
    assert rates(8, warmup_steps=4, schedule="linear") == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.75, 0.5, 0.25])
