"""Tokens per second by engine, concurrency and length of answers.

    rollout.py                                              the embedded model on this CPU
    rollout.py --model smollm2-135m --device cuda --concurrency 64 256 512 --length 64 256

As many rollouts as `--concurrency` says are asked for at once, in groups of 8, and none stops before its length. The
rate counts written tokens, from the call to the last answer, prompts included in the time; the best of `--rounds`.
`two_streams` is the time of the same rollouts asked by two callers, half of them each, the second a moment after the
first, divided by the time of one caller. At 1, callers share the engine at full speed; at most 1.05 is wanted.
Rounds of both kinds alternate. Rows are merged into results/rollout_DEVICE.json.
"""

import argparse
import asyncio
import json
import time
from typing import Any

from _engines import MODELS, a_policy, device_name, engines_here, run_cases, show, store, versions

GROUP, PROMPT = 8, 32
KEYS = ("engine", "model", "device", "lora", "concurrency", "length")


def case_rows(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Every concurrency and length with one engine."""
    from podium.settings.lookup import find

    policy = a_policy(case["model"], case["device"], case["lora"])
    most = max(case["concurrency"])
    options: dict[str, Any] = {"concurrency": most}
    if case["engine"] == "vllm_local":
        options |= {"max_context_tokens": PROMPT + max(case["length"]) + 1, "eager": case["device"] == "cpu"}
    started = time.perf_counter()
    engine = find("engine", case["engine"])(policy, **options)
    start_s = time.perf_counter() - started
    try:
        return asyncio.run(measure(engine, policy, case, start_s))
    finally:
        engine.close()


async def measure(engine: Any, policy: Any, case: dict[str, Any], start_s: float) -> list[dict[str, Any]]:
    await engine.load_weights(policy.named_weights(), 0)
    await seconds(engine, policy, min(case["concurrency"]), 8)
    rows = []
    for length in case["length"]:
        for concurrency in case["concurrency"]:
            one, two = [], []
            for _ in range(case["rounds"]):
                one.append(await seconds(engine, policy, concurrency, length))
                two.append(await seconds(engine, policy, concurrency, length, streams=2))
            taken = min(one)
            rows.append(
                {
                    "engine": case["engine"],
                    "model": case["model"],
                    "device": device_name(case["device"]),
                    "lora": case["lora"],
                    "concurrency": concurrency,
                    "length": length,
                    "tokens_per_s": round(concurrency * length / taken),
                    "seconds": round(taken, 3),
                    "two_streams": round(min(two) / taken, 3),
                    "engine_start_s": round(start_s, 1),
                    **versions(),
                }
            )
    return rows


async def seconds(engine: Any, policy: Any, rollouts: int, length: int, streams: int = 1) -> float:
    from podium.records import PrefixGroup, Request, Sampling

    sampling, asked = Sampling(max_new_tokens=length), []
    for key in range(-(-rollouts // GROUP)):
        prompt = tuple((key * 31 + place * 7) % (policy.vocabulary - 3) + 3 for place in range(PROMPT))
        count = min(GROUP, rollouts - key * GROUP)
        group = PrefixGroup(f"rollout/{key}", count)
        asked += [Request(prompt, sampling, key * GROUP + index, group) for index in range(count)]
    started = time.perf_counter()
    half = -(-len(asked) // streams // GROUP) * GROUP
    parts = [asked[first : first + half] for first in range(0, len(asked), half)]
    written = await asyncio.gather(*(stream(engine, part, k) for k, part in enumerate(parts)))
    answers = [answer for part in written for answer in part]
    taken = time.perf_counter() - started
    assert sum(len(answer.token_ids) for answer in answers) == rollouts * length
    return taken


async def stream(engine: Any, requests: list[Any], number: int) -> list[Any]:
    """One caller's requests; later callers begin when the first is being served."""
    await asyncio.sleep(0.005 * number)
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--case", help=argparse.SUPPRESS)
    arguments.add_argument("--model", choices=MODELS, default="embedded")
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--engines", nargs="+", default=engines_here())
    arguments.add_argument("--weights", nargs="+", choices=["lora", "full"], default=["lora", "full"])
    arguments.add_argument("--concurrency", nargs="+", type=int, default=[16, 64, 256])
    arguments.add_argument("--length", nargs="+", type=int, default=[24, 96])
    arguments.add_argument("--rounds", type=int, default=2)
    options = arguments.parse_args()
    if options.case is not None:
        print(json.dumps(case_rows(json.loads(options.case))))
        return
    shared = {name: getattr(options, name) for name in ("model", "device", "concurrency", "length", "rounds")}
    cases = [{**shared, "engine": e, "lora": w == "lora"} for e in options.engines for w in options.weights]
    rows = run_cases(__file__, cases)
    show(
        rows,
        (
            "engine",
            "model",
            "lora",
            "concurrency",
            "length",
            "tokens_per_s",
            "seconds",
            "two_streams",
            "engine_start_s",
        ),
    )
    print(store("rollout", options.device, rows, KEYS))


if __name__ == "__main__":
    main()
