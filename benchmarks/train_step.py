"""One optimizer step of the trainer: tokens a second, model FLOP utilisation, peak memory.

    train_step.py --shape smollm2-135m --rollouts 512 --prompt 60 --answer 90 --precision bfloat16 --budget 32768
    train_step.py --shape qwen3-1.7b --rollouts 64 --prompt 128 --answer 384 --precision bfloat16 --budget 4096

    train_step.py --shape smollm2-135m … --trl 64       the same step by TRL's trainer, 64 rollouts at a time

Random weights of a real model's shape, answers of spread lengths or of one (`--even`), full weights. Tokens are those
of prompts and answers as sampled, whether or not a prompt is computed once for its group. MFU is 6 · parameters ·
tokens over the GPU's peak in bfloat16 (`--peak`, 790 TFLOP/s for an H200); on a CPU it means nothing. Prints one line
of JSON.
"""

import argparse
import asyncio
import json
import random
import time
from types import SimpleNamespace
from typing import Any

import torch
from _end_to_end_gpu import WORKLOADS, config_of
from transformers import AutoModelForCausalLM, LlamaConfig

from podium.loss.grpo import grpo
from podium.loss.objective import Correction, Objective
from podium.model import attention
from podium.model.forward import keep_exact_sums
from podium.pack import pack
from podium.records import Group, Prompt, Rollout, ids_digest
from podium.trainer.single import Single

SHAPES: dict[str, Any] = {
    "embedded": LlamaConfig(
        vocab_size=100, hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=2
    ),
    "smollm2-135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    **{name: config_of(WORKLOADS[name]) for name in ("qwen3-0.6b", "qwen3-1.7b")},
}


def a_group(ordinal: int, size: int, prompt: int, answer: int, vocabulary: int, *, is_even: bool) -> Group:
    """Random ids; answers from a third of the mean length to five thirds, or all of one length."""
    draw = random.Random(ordinal)
    rollouts = []
    for index in range(size):
        length = round(answer * (1 if is_even else draw.uniform(1 / 3, 5 / 3)))
        ids = tuple(draw.randrange(vocabulary) for _ in range(length))
        logprobs = (-1.0,) * len(ids)
        rollouts.append(Rollout(ids, logprobs, (1,) * len(ids), "stop", "", 0, 0, index, 0, ids_digest(ids)))
    ids = tuple(draw.randrange(vocabulary) for _ in range(prompt))
    advantages = tuple(draw.gauss(0, 1) for _ in range(size))
    return Group(Prompt(ordinal, ids), tuple(rollouts), rewards=(0.0,) * size, advantages=advantages)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = SHAPES[options.shape]
    with torch.device(device):
        kind = "sdpa" if options.trl else attention.NAME
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=kind)
    groups = [
        a_group(n, 8, options.prompt, options.answer, config.vocab_size, is_even=options.even)
        for n in range(options.rollouts // 8)
    ]
    tokens = sum(len(g.prompt.token_ids) + len(r.token_ids) for g in groups for r in g.rollouts)
    first, *seconds = (trl_seconds if options.trl else podium_seconds)(model, groups, options)
    median = sorted(seconds)[len(seconds) // 2]
    parameters = sum(p.numel() for p in model.parameters())
    return {
        **vars(options),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "parameters": parameters,
        "tokens": tokens,
        "first_step_s": round(first, 1),
        "seconds_median": round(median, 4),
        "tokens_per_s": round(tokens / median),
        "mfu": round(6 * parameters * tokens / median / (options.peak * 1e12), 4),
        "peak_memory_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device == "cuda" else None,
    }


def podium_seconds(model: Any, groups: list[Group], options: argparse.Namespace) -> list[float]:
    """The first step, which compiles, and the others."""
    keep_exact_sums(model)
    device, trained = next(model.parameters()).device, dict(model.named_parameters())
    policy: Any = SimpleNamespace(model=model, peft=None, device=device, trained_parameters=lambda: trained)
    trainer = Single(
        policy,
        Objective(grpo, correction=Correction(sequence_band=None)),
        shared_prefix=options.shared_prefix,
        lr=1e-6,
        compile=options.compile,
        precision=options.precision,
        gradient_checkpointing=options.checkpointing,
    )
    batches = pack(groups, max_tokens_per_batch=options.budget, temperature=1.0, shared_prefix=options.shared_prefix)
    return [_timed(trainer, batches) for _ in range(options.steps + 1)]


def trl_seconds(model: Any, groups: list[Group], options: argparse.Namespace) -> list[float]:
    from _trl_step import TrlStep

    step = TrlStep(model, groups, micro_batch=options.trl, bfloat16=options.precision == "bfloat16")
    return [step.seconds() for _ in range(options.steps + 1)]


def _timed(trainer: Single, batches: list[Any]) -> float:
    started = time.perf_counter()
    result = asyncio.run(trainer.step(batches))
    assert result.updated
    return time.perf_counter() - started


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--shape", choices=SHAPES, default="embedded")
    arguments.add_argument("--rollouts", type=int, default=128)
    arguments.add_argument("--prompt", type=int, default=18)
    arguments.add_argument("--answer", type=int, default=22)
    arguments.add_argument("--even", action="store_true", help="all answers as long as the mean")
    arguments.add_argument("--budget", type=int, default=16384, help="tokens per batch")
    arguments.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    arguments.add_argument("--checkpointing", action="store_true")
    arguments.add_argument("--shared-prefix", action="store_true", help="compute a prompt once for its group")
    arguments.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    arguments.add_argument("--trl", type=int, default=0, help="measure TRL's trainer, with this micro-batch")
    arguments.add_argument("--steps", type=int, default=5)
    arguments.add_argument("--peak", type=float, default=790.0, help="TFLOP/s of the GPU in bfloat16")
    print(json.dumps(measure(arguments.parse_args())))
