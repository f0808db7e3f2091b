"""In a process of its own: a real vLLM in one precision, one fault after the other; prints what each push found."""

import asyncio
import json
from typing import Any

import torch

from podium.engine.vllm.steps import Served
from podium.engine.vllm_local import VllmLocal, listed_rank
from podium.model.evidence import difference
from podium.model.load import load_policy
from podium.settings.sections import Model


async def found(dtype: str) -> dict[str, Any]:
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": {"r": 12}}), seed=0)
    engine = VllmLocal(policy, eager=True, max_context_tokens=96, dtype=dtype)  # type: ignore[arg-type]
    results: dict[str, Any] = {"ranks": [listed_rank(rank) for rank in (4, 12, 24, 48)]}
    version = 0

    async def push(name: str, change: Any) -> None:
        nonlocal version
        with torch.no_grad():
            for _, parameter in policy.named_weights():
                parameter.add_(1e-7)
        sent = dict(policy.named_weights())
        await engine.load_weights(change(sent).items(), version)
        version += 1
        if name == "no adapter in requests":
            engine._steps.serve(Served(version, "none"))
        held = await engine.held()
        assert held is not None
        results[name] = difference(policy.named_weights(), held, policy.adapter_scale)

    await push("right", lambda sent: sent)
    old = {name: tensor.clone() for name, tensor in policy.named_weights()}
    await push("old", lambda sent: old)
    await push("half scale", lambda sent: {n: t / 2 if n.endswith("B") else t for n, t in sent.items()})
    await push("half of the layers", lambda sent: {n: t * 0 if ".1." in n else t for n, t in sent.items()})
    await push("no adapter in requests", lambda sent: sent)
    await push("right again", lambda sent: sent)
    engine.close()
    return results


def main(dtype: str) -> None:
    print("FOUND" + json.dumps(asyncio.run(found(dtype))), flush=True)
