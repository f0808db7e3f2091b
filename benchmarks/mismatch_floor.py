"""How far a policy's logprobs move when nothing but the order of sums changes: what of a mismatch no sampler can help.

    python benchmarks/mismatch_floor.py                                   # SmolLM2-135M, two minutes on two cores
    python benchmarks/mismatch_floor.py --models qwen3-0.6b qwen3-1.7b    # random weights of these shapes, five minutes

Sampler and trainer compute the same model, bfloat16 products over a float32 residual, in batches of different shapes;
so the sums inside their products are taken in different orders. Here one program on the CPU is both: the linear layers'
sums are float32 and rounded to bfloat16 (those that the residual stream takes are not), and the second time their terms
stand in another order. What that does to the logprobs is the floor of this arithmetic; who has less sums in the same
order, or rounds less.
"""

import argparse
import json
import types
from pathlib import Path
from typing import Any

import torch
from _end_to_end_gpu import SYSTEM_TURN, WORKLOADS, config_of, now, versions
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

from podium.model.forward import ExactLinear, keep_exact_sums
from podium.model.hub import smollm2_folder

RESULTS = Path(__file__).parent / "results" / "mismatch_floor_cpu.json"
NUM_ORDERS = 3
REAL = "smollm2-135m"
SHAPES = [name for name, work in WORKLOADS.items() if work.shape is not None]
QUESTIONS = ("What is 47 + 38?", "What is 12 + 80?", "What is 65 + 17?", "What is 31 + 54?")
ATTENTION = "bfloat16_attention"

Text = tuple[torch.Tensor, torch.Tensor]
"""Token ids, and for each of the last positions the token whose logprob counts."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[REAL, *SHAPES], default=[REAL])
    parser.add_argument("--answers", type=int, default=2, help="of the real model to each of four questions")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
    for name in args.models:
        model, texts = real_model(args.answers) if name == REAL else random_model(name)
        tokens = sum(len(targets) for _, targets in texts)
        found[name] = {"mean_abs_gaps": gaps(model, texts), "tokens": tokens, "date": now(), "versions": versions()}
        print(name, tokens, "tokens:", found[name]["mean_abs_gaps"], flush=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def real_model(answers: int) -> tuple[Any, list[Text]]:
    """With answers of its own; their tokens count."""
    folder = smollm2_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for seed, question in enumerate(QUESTIONS * answers):
        turns = [SYSTEM_TURN, {"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        torch.manual_seed(seed)
        ids = model.generate(prompt, do_sample=True, top_k=0, max_new_tokens=256)[0]
        texts.append((ids[:-1], ids[prompt.shape[1] :]))
    return model, texts


@torch.no_grad()
def random_model(name: str) -> tuple[Any, list[Text]]:
    """With random tokens, as many as an answer may have; what counts is a token drawn after each of them."""
    torch.manual_seed(0)
    config = config_of(WORKLOADS[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    ids = torch.randint(0, config.vocab_size, (WORKLOADS[name].max_new_tokens,))
    drawn = torch.multinomial(model(input_ids=ids[None]).logits[0].softmax(-1), 1)[:, 0]
    return model, [(ids, drawn)]


@torch.no_grad()
def gaps(model: Any, texts: list[Text]) -> list[float]:
    """For each of several orders, the mean distance of a token's logprob from that with the terms as they stand."""
    keep_exact_sums(model)
    model.eval().set_attn_implementation(ATTENTION)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.forward = types.MethodType(product, module)
    plain = torch.cat([logprobs(model, *text, order=None) for text in texts])
    assert torch.equal(plain, torch.cat([logprobs(model, *text, order=None) for text in texts])), "not reproducible"
    found = []
    for order in range(NUM_ORDERS):
        other = torch.cat([logprobs(model, *text, order=order) for text in texts])
        found.append(round(float((other - plain).abs().mean()), 6))
    return found


def logprobs(model: Any, ids: torch.Tensor, targets: torch.Tensor, order: int | None) -> torch.Tensor:
    """Of the targets, which are those of the last positions."""
    product.order = order  # type: ignore[attr-defined]
    states = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state[0, -len(targets) :]
    logits = rounded(states) @ rounded(model.get_output_embeddings().weight).T
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def product(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Of operands in bfloat16, summed in float32 and rounded but where the residual stream takes the sum."""
    order = product.order  # type: ignore[attr-defined]
    a, b = rounded(x), rounded(self.weight)
    if order is not None:
        places = torch.randperm(a.shape[-1], generator=torch.Generator().manual_seed(order))
        a, b = a[..., places], b[:, places]
    return a @ b.T if isinstance(self, ExactLinear) else (a @ b.T).bfloat16()


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
