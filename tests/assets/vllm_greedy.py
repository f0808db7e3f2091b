"""Greedy answers by vLLM alone, in a process of its own."""

import json
import os
from typing import Any

from podium.engine.vllm_local import ENVIRONMENT
from tests import commands


def answers(folder: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """`token_ids` and `logprobs` of each."""
    done = commands.call(f"{__name__}:main", folder, prompts, modules=commands.VLLM)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    return json.loads(line.removeprefix("ANSWERS "))


def main(folder: str, prompts: list[list[int]]) -> None:
    os.environ |= ENVIRONMENT
    from vllm import LLM, SamplingParams

    engine = LLM(model=folder, dtype="float32", max_model_len=128, max_num_seqs=16, enforce_eager=True)
    sampling = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    made = [
        {
            "token_ids": list(output.outputs[0].token_ids),
            "logprobs": [
                entry[i].logprob
                for i, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ],
        }
        for output in outputs
    ]
    print("ANSWERS " + json.dumps(made))
