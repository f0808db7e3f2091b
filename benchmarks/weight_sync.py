"""Milliseconds until an engine has new weights, by channel and model; the parity probe apart.

    weight_sync.py                                          the embedded model on this CPU
    weight_sync.py --models smollm2-135m --device cuda

Weights move before every push, as a step would move them, and the probe proves each one. `carry` is a channel's work;
`probe` is 64 tokens through trainer and engine. Median of `--pushes` after a first one. `shared` hands tensors over in
memory: nothing moves for the in-process engine's full weights, which are the trainer's own; `copy` is the same channel
to an engine with a snapshot. `adapter` and `disk` go through a published folder, with hashes. Rows are merged into
results/weight_sync_DEVICE.json. Bars on an H200: an adapter within 50 ms, full weights of 135M in process within 20 ms.
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _engines import MODELS, a_policy, device_name, engines_here, run_cases, show, store, versions

KEYS = ("engine", "channel", "model", "device", "lora")


class Standing:
    """What a channel asks of a trainer, over a policy that moves between pushes."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy

    def weights(self) -> Any:
        return self._policy.named_weights()

    async def score(self, token_ids: Any) -> list[float]:
        from podium.model.device_thread import on_device_thread
        from podium.model.forward import sequence_logprobs

        return await on_device_thread(sequence_logprobs, self._policy.model, list(token_ids))

    def move(self) -> None:
        import torch

        with torch.no_grad():
            for parameter in self._policy.model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter), alpha=1e-4)


def case_rows(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Every channel to one engine."""
    from podium.settings.lookup import find

    policy = a_policy(case["model"], case["device"], case["lora"])
    is_vllm = case["engine"] == "vllm_local"
    options = {"eager": True, "max_context_tokens": 128, "concurrency": 16} if is_vllm else {}
    engine = find("engine", case["engine"])(policy, case["snapshot"], **options)
    folder = "adapter" if case["lora"] else "disk"
    channels = ["shared"] if case["snapshot"] else ["shared", folder]
    try:
        return [asyncio.run(pushes(policy, engine, channel, case)) for channel in channels]
    finally:
        engine.close()


async def pushes(policy: Any, engine: Any, channel: str, case: dict[str, Any]) -> dict[str, Any]:
    import torch

    from podium.settings.lookup import find
    from podium.sync import Delivery, Noise, check_parity

    trainer: Any = Standing(policy)
    noise = Noise(engine.traits.dtype)
    probe = [place % (policy.vocabulary - 3) + 3 for place in range(64)]
    carried, probed = [], []
    with tempfile.TemporaryDirectory(prefix="podium-sync-") as place:
        delivery = Delivery(trainer, engine, policy, probe, noise, Path(place))
        carry = find("sync", channel)(delivery)._carry
        for version in range((engine.policy_version or 0) + 1, (engine.policy_version or 0) + case["pushes"] + 2):
            trainer.move()
            _settle(torch, case)
            started = time.perf_counter()
            await carry(version)
            _settle(torch, case)
            carried.append(time.perf_counter() - started)
            started = time.perf_counter()
            await check_parity(trainer, engine, probe, version, noise, delivery.difference)
            probed.append(time.perf_counter() - started)
    moved = sum(tensor.numel() * tensor.element_size() for _, tensor in policy.named_weights())
    return {
        "engine": case["engine"],
        "channel": "copy" if case["snapshot"] else channel,
        "model": case["model"],
        "device": device_name(case["device"]),
        "lora": case["lora"],
        "megabytes": round(moved / 1e6, 2),
        "carry_ms": round(1e3 * statistics.median(carried[1:]), 2),
        "carry_ms_worst": round(1e3 * max(carried[1:]), 2),
        "probe_ms": round(1e3 * statistics.median(probed[1:]), 2),
        **versions(),
    }


def _settle(torch: Any, case: dict[str, Any]) -> None:
    if case["device"] == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--case", help=argparse.SUPPRESS)
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=["embedded"])
    arguments.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments.add_argument("--engines", nargs="+", default=engines_here())
    arguments.add_argument("--pushes", type=int, default=7)
    options = arguments.parse_args()
    if options.case is not None:
        print(json.dumps(case_rows(json.loads(options.case))))
        return
    cases = [
        {"model": m, "engine": e, "lora": lora, "snapshot": copy, "device": options.device, "pushes": options.pushes}
        for m in options.models
        for e in options.engines
        for lora, copy in ((True, False), (False, False), (False, True))
        if not (copy and e != "inprocess")
    ]
    rows = run_cases(__file__, cases)
    show(rows, ("engine", "channel", "model", "lora", "megabytes", "carry_ms", "carry_ms_worst", "probe_ms"))
    print(store("weight_sync", options.device, rows, KEYS))


if __name__ == "__main__":
    main()
