"""How often `math` and `gsm8k` are wrong on pairs judged by hand, beside plain math-verify.

    python -m benchmarks.math_verdicts [--show]

Prints false positives (share of the wrong answers that score 1), false negatives (share of the right ones that score
0) and the time of a verdict, for the pairs that the code was written with and for those that were held out.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

from math_verify import parse, verify

from podium.records import Prompt, Rollout
from podium.reward.gsm8k import gsm8k
from podium.reward.math import math
from tests.builders import make_prompt, make_rollout
from tests.reward.math_judged import (
    GSM8K_RIGHT,
    GSM8K_WRONG,
    RIGHT,
    SECOND_RIGHT,
    SECOND_WRONG,
    WRONG,
    held_out,
)

Pair = tuple[str, str, bool, bool]
Reward = Callable[[Prompt, Rollout], float]


def pairs_of(table: dict[str, list[tuple[str, str]]], verdict: bool) -> list[Pair]:
    """Label, text, verdict and whether it was held out, for every pair."""
    return [
        (label, text, verdict, held_out(place)) for pairs in table.values() for place, (label, text) in enumerate(pairs)
    ]


def of_reward(reward: Reward) -> Callable[[str, str], bool]:
    """The verdict of a reward."""
    return lambda label, text: reward(make_prompt(answer=label), make_rollout(text)) == 1


def plain_math_verify(label: str, text: str) -> bool:
    """What math-verify says by itself, as its documentation calls it."""
    try:
        return verify(parse(f"${label}$"), parse(text))
    except Exception:
        return False


def measure(name: str, judge: Callable[[str, str], bool], pairs: list[Pair], show: bool) -> None:
    """Print the rates and times of a judge on the pairs."""
    times: list[float] = []
    said: list[bool] = []
    for label, text, verdict, is_held_out in pairs:
        started = time.perf_counter()
        said.append(judge(label, text))
        times.append(1000 * (time.perf_counter() - started))
        if show and said[-1] != verdict and not is_held_out:
            print(f"  {'refused' if verdict else 'ACCEPTED'}  label {label!r}  text {text!r}")
    for part, chosen in (("seen", False), ("held out", True)):
        rows = [(pair[2], verdict) for pair, verdict in zip(pairs, said, strict=True) if pair[3] is chosen]
        right = [verdict for is_right, verdict in rows if is_right]
        wrong = [verdict for is_right, verdict in rows if not is_right]
        if not rows:
            continue
        print(
            f"{name:19} {part:9} false positives {sum(wrong):3} of {len(wrong):3} ({sum(wrong) / len(wrong):6.1%})  "
            f"false negatives {len(right) - sum(right):3} of {len(right):3} ({1 - sum(right) / len(right):6.1%})"
        )
    quantiles = statistics.quantiles(times, n=100)
    print(f"{name:19} ms a verdict: median {quantiles[49]:.2f}, p99 {quantiles[98]:.1f}, longest {max(times):.1f}")


def main() -> None:
    """Measure each judge."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", action="store_true", help="print the seen pairs that are judged wrongly")
    show: bool = parser.parse_args().show
    pairs = pairs_of(RIGHT, True) + pairs_of(WRONG, False)
    for name, judge in {
        "math": of_reward(cast(Any, math)),
        **({} if show else {"math-verify": plain_math_verify}),
    }.items():
        measure(name, judge, pairs, show and name == "math")
    second = [(*pair, True, True) for pair in SECOND_RIGHT] + [(*pair, False, True) for pair in SECOND_WRONG]
    for name, judge in {"math": of_reward(cast(Any, math)), "math-verify": plain_math_verify}.items():
        measure(f"{name}, second", judge, second, False)
    numbers = pairs_of({"": GSM8K_RIGHT}, True) + pairs_of({"": GSM8K_WRONG}, False)
    measure("gsm8k", of_reward(cast(Any, gsm8k)), numbers, show)


if __name__ == "__main__":
    main()
