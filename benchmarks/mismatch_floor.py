"""How far a policy's logprobs move when nothing but the order of sums changes: the floor of any mismatch in bfloat16.

    python benchmarks/mismatch_floor.py                                   # SmolLM2-135M, a minute on two cores
    python benchmarks/mismatch_floor.py --models qwen3-0.6b qwen3-1.7b    # random weights of these shapes, five minutes

Sampler and trainer compute the same model in bfloat16 over a float32 residual, in batches of different shapes; so the
sums inside their matrix products are taken in different orders, and a sum differs by about one part in ten million
before it is rounded to bfloat16. Here both sides are one program on the CPU, and to the second a relative error of that
size is added by hand, in every product of the layers. What it does to the logprobs of sampled tokens is the floor: who
has less computes bit for bit alike.
"""

import argparse
import json
import types
from pathlib import Path
from typing import Any

import torch
from _end_to_end_gpu import SYSTEM_TURN, WORKLOADS, now, versions
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from podium.model.smollm2 import smollm2_folder

RESULTS = Path(__file__).parent / "results" / "mismatch_floor_cpu.json"
ERRORS = (0.0, 1e-7, 1e-5)
"""Of a product before it is rounded, relative to the size of the products around it; 0 shows that the rest is exact."""
REAL = "smollm2-135m"
ATTENTION = "bfloat16_attention"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(WORKLOADS), default=[REAL])
    parser.add_argument("--answers", type=int, default=4, help="of the real model; of random weights one")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
    for name in args.models:
        model, texts = real_model(args.answers) if name == REAL else random_model(name)
        found[name] = {"mean_abs_gap": gaps(model, texts), "date": now(), "versions": versions()}
        print(name, json.dumps(found[name]["mean_abs_gap"]), flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def real_model(num_answers: int) -> tuple[Any, list[torch.Tensor]]:
    """With answers of its own to one of the benchmark's prompts."""
    folder = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = [SYSTEM_TURN, {"role": "user", "content": "What is 47 + 38?"}]
    prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    texts = []
    for seed in range(num_answers):
        torch.manual_seed(seed)
        texts.append(model.generate(prompt, do_sample=True, top_k=0, min_new_tokens=150, max_new_tokens=200)[0])
    return model, texts


def random_model(name: str) -> tuple[Any, list[torch.Tensor]]:
    """With random tokens, as many as an answer may have."""
    torch.manual_seed(0)
    work = WORKLOADS[name]
    assert work.shape is not None
    config = Qwen3Config(**work.shape, tie_word_embeddings=True, max_position_embeddings=4096)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model, [torch.randint(0, work.shape["vocab_size"], (work.max_new_tokens,))]


@torch.no_grad()
def gaps(model: Any, texts: list[torch.Tensor]) -> dict[str, float]:
    """By error: the mean distance of a drawn token's logprob from that without one."""
    model.eval().set_attn_implementation(ATTENTION)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.forward = types.MethodType(product, module)
    totals = dict.fromkeys(map(str, ERRORS), 0.0)
    count = sum(map(len, texts))
    for number, text in enumerate(texts):
        plain = logprobs(model, text, 0.0)
        torch.manual_seed(number)
        drawn = torch.multinomial(plain.exp(), 1)
        for error in ERRORS:
            other = logprobs(model, text, error)
            totals[str(error)] += float((other - plain).gather(1, drawn).abs().sum()) / count
    return {error: round(total, 6) for error, total in totals.items()}


def logprobs(model: Any, text: torch.Tensor, error: float) -> torch.Tensor:
    """`[tokens, vocabulary]`"""
    product.error = error  # type: ignore[attr-defined]
    states = model.get_decoder()(input_ids=text[None], use_cache=False).last_hidden_state[0]
    head = model.get_output_embeddings().weight
    return (rounded(states) @ rounded(head).T).log_softmax(-1)


def product(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Of operands in bfloat16, summed in float32 and rounded, as a GPU does it."""
    made = rounded(x) @ rounded(self.weight).T
    error = product.error  # type: ignore[attr-defined]
    return (made + error * made.abs().mean() * torch.randn_like(made) if error else made).bfloat16()


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16().float()


def bfloat16_attention(module, query, key, value, attention_mask, scaling=None, **others):
    """transformers' attention interface."""
    halves = (tensor.bfloat16() for tensor in (query, key, value))
    made = scaled_dot_product_attention(*halves, is_causal=True, scale=scaling, enable_gqa=True)
    return made.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, bfloat16_attention)

if __name__ == "__main__":
    main()
