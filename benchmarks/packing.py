"""How full batches get: best fit against next fit and padding, on a long-tailed sample of lengths.

    python benchmarks/packing.py [--rollouts 512] [--budget 16384] [--median 400] [--sigma 0.9]

Lengths are log-normal, cut at the budget. Fill is tokens over batches times budget; for padding it is tokens over the
table of 32 rows padded to their longest. Nothing is dropped by any of them.
"""

import argparse
import math
import random
import time

from podium.pack import best_fit


def next_fit(lengths: list[int], room: int) -> list[list[int]]:
    """The plain way: open a new batch whenever the next document does not fit."""
    bins: list[list[int]] = []
    left = 0
    for index, length in enumerate(lengths):
        if length > left:
            bins.append([])
            left = room
        bins[-1].append(index)
        left -= length
    return bins


def padded_fill(lengths: list[int]) -> float:
    """Batches of 32 rows, each padded to the longest of its batch."""
    batches = [lengths[start : start + 32] for start in range(0, len(lengths), 32)]
    return sum(lengths) / sum(len(batch) * max(batch) for batch in batches)


def main(rollouts: int, budget: int, median: float, sigma: float) -> None:
    draw = random.Random(0)
    lengths = [min(budget, max(1, round(median * math.exp(sigma * draw.gauss(0, 1))))) for _ in range(rollouts)]
    print(f"{rollouts} documents, {sum(lengths)} tokens, longest {max(lengths)}, budget {budget}")
    for name, method in (("best fit", best_fit), ("next fit", next_fit)):
        started = time.perf_counter()
        bins = method(lengths, budget)
        milliseconds = 1000 * (time.perf_counter() - started)
        assert sorted(index for bin_ in bins for index in bin_) == list(range(rollouts))
        fill = sum(lengths) / (len(bins) * budget)
        fewest = math.ceil(sum(lengths) / budget)
        print(f"{name:<10} {len(bins):>4} batches (at least {fewest})  fill {fill:.4f}  {milliseconds:.1f} ms")
    print(f"{'padding':<10} {'':<27} fill {padded_fill(lengths):.4f}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--rollouts", type=int, default=512)
    arguments.add_argument("--budget", type=int, default=16384)
    arguments.add_argument("--median", type=float, default=400)
    arguments.add_argument("--sigma", type=float, default=0.9)
    main(**vars(arguments.parse_args()))
