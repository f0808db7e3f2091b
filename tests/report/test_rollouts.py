from typing import Any

import pytest

from podium.report.web.reader import (
    LAST_STEPS,
    LIMITS,
    MAX_GRID_STEPS,
    MAX_STEP_BYTES,
    ROLLOUTS_PER_STEP,
    chosen,
    for_page,
    shown_steps,
)


def make_line(reward: float | None = 1.0, text: str = "", **others: Any) -> dict[str, Any]:
    line = {
        "ordinal": 0,
        "sample_index": 0,
        "policy_version": [0, 0],
        "trained": True,
        "prompt": "What?",
        "answer": "3",
        "text": text or f"rewarded {reward}",
        "reward": reward,
        "reward_parts": {"exact": reward},
        "correct": None,
        "advantage": 0.0,
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": [-0.123456, -1.0],
    }
    return line | others


@pytest.mark.parametrize("last", [0, 1, 5, 32, 33, 64, 1000, 10_000])
def test_a_page_has_rollouts_of_few_steps_the_last_ones_among_them(last: int) -> None:
    steps = shown_steps(last)
    assert len(steps) <= MAX_GRID_STEPS + LAST_STEPS
    assert steps == sorted(set(steps))
    assert set(range(max(1, last - 2), last + 1)) <= set(steps) <= set(range(1, last + 1))


def test_the_grid_of_a_longer_run_needs_no_step_that_a_shorter_ones_left_out() -> None:
    for last in range(1, 300):
        assert set(shown_steps(last + 1)) - {last + 1, last, last - 1} <= set(shown_steps(last))


def test_the_best_the_worst_and_some_between_are_chosen() -> None:
    lines = [make_line(float(reward)) for reward in range(100)]
    rewards = [each["reward"] for each in chosen(lines, 7)]
    # 12 of 100: four from each end, and between them (95 … 4) every 92 / 4 = 23rd
    assert rewards == [99.0, 98.0, 97.0, 96.0, 95.0, 72.0, 49.0, 26.0, 3.0, 2.0, 1.0, 0.0]
    assert len(rewards) == ROLLOUTS_PER_STEP


def test_no_two_chosen_ones_are_alike_and_abstained_ones_are_seen() -> None:
    lines = [make_line(1.0), make_line(1.0), make_line(None, "nobody judged it")]
    assert [each["reward"] for each in chosen(lines, 1)] == [1.0, None]


def test_a_step_has_so_much_room_and_no_more() -> None:
    lines = [make_line(float(number), f"{number} " + "x" * 11_000) for number in range(30)]
    texts = [each["text"] for each in chosen(lines, 1)]
    assert len(texts) == 8  # 11 kB and some each, of 100 kB
    assert sum(map(len, texts)) < MAX_STEP_BYTES
    huge = make_line(1.0, "\x00" * 1_000_000, token_ids=[1] * 9999, logprobs=[-1.0] * 9999)
    assert len(chosen([huge, make_line(0.0)], 1)) == 2  # cut, it leaves room
    full = make_line(1.0, "\x00" * 1_000_000, prompt="\x00" * 1_000_000)
    assert len(chosen([full, make_line(0.0)], 1)) == 1  # \u0000 is six bytes: the first alone is over, and is shown


def test_long_texts_are_cut_for_the_page_and_whole_for_the_live_one() -> None:
    line = make_line(1.0, "x" * 50_000, prompt="y" * 50_000, token_ids=[1] * 5000, logprobs=[-1.0] * 5000)
    line |= {"logprob_gaps": [0.5] * 5000, "answer": "z" * 50_000}
    cut, whole = for_page(line, 3, is_cut=True), for_page(line, 3, is_cut=False)
    assert {key: len(cut[key]) for key in LIMITS if key != "answer"} == {
        k: v for k, v in LIMITS.items() if k != "answer"
    }
    assert (cut["num_chars"], cut["num_tokens"]) == (50_000, 5000)
    assert [len(whole[key]) for key in ("text", "prompt", "token_ids", "logprob_gaps")] == [50_000, 50_000, 5000, 5000]


def test_a_rollout_that_was_not_trained_has_no_gaps() -> None:
    assert for_page(make_line(), 1, is_cut=True)["logprob_gaps"] is None
