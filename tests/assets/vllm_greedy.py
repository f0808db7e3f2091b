"""Run by a test in a process of its own: greedy answers of the embedded model by vLLM, as JSON."""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    folder, prompts = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(model=folder, dtype="float32", max_model_len=128, max_num_seqs=16, enforce_eager=True)
    sampling = SamplingParams(temperature=0, max_tokens=24, logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling)
    answers = [
        {
            "token_ids": list(output.outputs[0].token_ids),
            "logprobs": [
                entry[i].logprob
                for i, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ],
        }
        for output in outputs
    ]
    print("ANSWERS " + json.dumps(answers))


if __name__ == "__main__":
    main()
