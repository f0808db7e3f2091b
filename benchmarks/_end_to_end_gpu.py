"""`end_to_end.py --gpu`: whole GRPO steps of Podium and of TRL with vLLM colocated, on one GPU, at equal work.

    python benchmarks/end_to_end.py --gpu                                  # every model and contender that is missing
    python benchmarks/end_to_end.py --gpu --models smollm2-135m --contenders podium trl-128 --steps 12 --again

Each contender is a process of its own, one after the other: same prompts in the same order, group size, longest answer,
temperature, bfloat16 products over float32 weights, loss (mean over the step's tokens, importance correction capped, no
KL), AdamW, learning rate and seed; no group is skipped. Podium computes a prompt once for its group in training too
(`pack.shared_prefix`). `trl-N` goes through N rollouts at a time, with TRL's fastest settings otherwise; `trl-docs` is
what its documentation shows: its defaults, 8 at a time, activations recomputed; `podium-overlap` samples the next step
while it trains this one (`run.max_lag = 1`), so each of the two takes longer and the step less than their sum. What
was measured before stays in the results file, so a model or a contender can be measured by itself. A step's time is
from the end of the step before it to its own end.
Memory is what the whole GPU has given away, at its highest. MFU counts the tokens that passed through the model,
padding aside.

`smollm2-135m` is the real model (a folder, `--smollm2`), scored by the arithmetic reward. The others have random
weights of a real model's shape and the first one's tokenizer; their answers run to the limit and are scored by a hash
of the text, so that every group has a signal. `-long`: answers of up to 1,024 tokens. `qwen3-8b-lora`: a LoRA adapter
of rank 16 on every linear layer over a base in bfloat16, on both sides.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

from _trl_config import trl_config

from podium import declare_range, runs_inline

RESULTS = Path(__file__).parent / "results" / "end_to_end_h200.json"
PODIUM = ("podium", "podium-overlap", "podium-vllm")
TRL_AS_DOCUMENTED, TRL_DEFAULT_BATCH = "trl-docs", 8
SEED, GROUP_SIZE, LEARNING_RATE = 0, 8, 1e-5
LORA_RANK = 16
SYSTEM = "Answer with one short calculation, then a last line of the form: #### 85"
SYSTEM_TURN = {"role": "system", "content": SYSTEM}
VLLM_MEMORY_SHARE = 0.3
PEAK_FLOPS = 790e12
"""Of bfloat16 products on one H200, as `train_step.py` counts."""
REWARD_WINDOW = 3
"""Steps over which the reward is averaged before it is compared with the threshold."""


@dataclass(frozen=True)
class Workload:
    prompts_per_step: int
    max_new_tokens: int
    reward: str
    trl_batches: tuple[int, ...] = ()
    """Rollouts that TRL takes at a time."""
    threshold: float | None = None
    """Mean reward whose time is told."""
    shape: Mapping[str, Any] | None = None
    """Of random weights; None for the real model."""
    lora: bool = False
    """An adapter over a base in bfloat16; otherwise full weights in float32."""

    @property
    def context(self) -> int:
        """Tokens of prompt and answer for which vLLM makes room."""
        return max(2048, self.max_new_tokens + 256)

    @property
    def contenders(self) -> list[str]:
        return [*PODIUM, *(f"trl-{rollouts}" for rollouts in self.trl_batches), TRL_AS_DOCUMENTED]


QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "num_attention_heads": 16, "head_dim": 128}
QWEN3_SMALL = QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
QWEN3_LARGE = QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
QWEN3_8B = QWEN3 | {"num_attention_heads": 32, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36}
WORKLOADS = {
    "smollm2-135m": Workload(64, 256, "arithmetic", (64, 128, 256), threshold=0.2),
    "qwen3-0.6b": Workload(32, 512, "hash", (16, 32, 64), shape=QWEN3_SMALL),
    "qwen3-1.7b": Workload(16, 1024, "hash", (4, 8, 16), shape=QWEN3_LARGE),
    "smollm2-135m-long": Workload(64, 1024, "arithmetic", (32, 64), threshold=0.2),
    "qwen3-0.6b-long": Workload(32, 1024, "hash", (8, 16), shape=QWEN3_SMALL),
    "qwen3-8b-lora": Workload(16, 512, "hash", (4, 8, 16), shape=QWEN3_8B, lora=True),
    "qwen3-8b-lora-long": Workload(8, 4096, "hash", (1, 2), shape=QWEN3_8B, lora=True),
}

Step = dict[str, float]


def main(arguments: Sequence[str]) -> None:
    args = parse_arguments(arguments)
    if args.contender:
        run_contender(args)
        return
    found: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {"models": {}}
    for model in args.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.smollm2 if WORKLOADS[model].shape is None else random_model(model, args.smollm2, scratch)
            for contender in args.contenders or WORKLOADS[model].contenders:
                measured = found["models"].setdefault(model, {"workload": asdict(WORKLOADS[model]), "contenders": {}})
                if contender in measured["contenders"] and not args.again:
                    continue
                measured["parameters"] = count_parameters(folder)
                measured["contenders"][contender] = measure(args, model, contender, folder)
                measured["ratios"] = ratios(measured["contenders"])
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(table(model, found["models"][model]), flush=True)


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="+", help=f"{', '.join(PODIUM)}, trl-N, trl-docs; by default all")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them, not measured; rewards count")
    parser.add_argument("--again", action="store_true", help="measure also what the results hold already")
    parser.add_argument("--smollm2", type=Path, default=Path.home() / "smollm2-135m", help="folder of the real model")
    parser.add_argument("--timeout", type=int, default=900, help="seconds for one contender")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--contender", help=argparse.SUPPRESS)  # what this process is to run
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ── The process that compares ─────────────────────────────────────────────────────────────────────────────────────


def measure(args: argparse.Namespace, model: str, contender: str, folder: Path) -> dict[str, Any]:
    """Runs one contender to its end; what it printed is kept if it fails."""
    script = str(Path(__file__).parent / "end_to_end.py")
    numbers = ["--steps", str(args.steps), "--warmup", str(args.warmup)]
    chosen = ["--contenders", contender]
    command = [sys.executable, script, "--gpu", "--contender", contender, "--models", model, *numbers]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        lines = Path(scratch) / "steps.jsonl"
        own = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "TMPDIR": scratch, "STEPS_FILE": str(lines), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*command, "--folder", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **own},
            timeout=args.timeout,
            check=False,
        )
        steps = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    if done.returncode or len(steps) < args.warmup + args.steps:
        print(done.stdout[-3000:])
        return {"failed": done.stdout.strip().splitlines()[-1:], "date": now(), "versions": versions()}
    total = time.perf_counter() - started
    return summarise(steps, args.warmup, WORKLOADS[model].threshold) | {
        "whole_process_s": round(total, 1),
        "command": " ".join(["python", "benchmarks/end_to_end.py", "--gpu", "--models", model, *chosen, *numbers]),
        "date": now(),
        "versions": versions(),
    }


def summarise(steps: Sequence[Step], warmup: int, threshold: float | None) -> dict[str, Any]:
    """Medians over the measured steps; totals and rewards over all."""
    own = steps[warmup:]
    rewards = [step["reward"] for step in steps]
    made = {
        "seconds_median": median(step["seconds"] for step in own),
        "seconds_lowest": min(step["seconds"] for step in own),
        "seconds_highest": max(step["seconds"] for step in own),
        "generation_s_median": median(step["generation_s"] for step in own),
        "training_s_median": median(step["training_s"] for step in own),
        "generated_tokens_per_s": sum(s["generated_tokens"] for s in own) / sum(s["generation_s"] for s in own),
        "trained_tokens_per_s": sum(s["trained_tokens"] for s in own) / sum(s["training_s"] for s in own),
        "passed_tokens_per_s": sum(s["passed_tokens"] for s in own) / sum(s["training_s"] for s in own),
        "generated_tokens_mean": fmean(step["generated_tokens"] for step in own),
        "trained_tokens_mean": fmean(step["trained_tokens"] for step in own),
        "mismatch_abs_mean": fmean(step["mismatch"] for step in own),
        "peak_memory_gb": max(step["memory_gb"] for step in steps),
        "reward_last": fmean(rewards[-REWARD_WINDOW:]),
        "reward_first": rewards[0],
    }
    return {name: round(value, 5) for name, value in made.items()} | {
        "stages_s_median": {
            name: round(median(step.get(name, 0.0) for step in own), 4) for name in own[0] if name.startswith("time/")
        },
        "first_step_stages_s": {name: round(steps[0][name], 2) for name in steps[0] if name.startswith("time/")},
        "optimizer_steps": sum(step["updates"] for step in steps),
        "seconds_to_threshold": seconds_to(threshold, steps),
        "seconds": [round(step["seconds"], 4) for step in steps],
        "rewards": [round(value, 4) for value in rewards],
    }


def seconds_to(threshold: float | None, steps: Sequence[Step]) -> float | None:
    """Training time until the reward, averaged over a few steps, reached the threshold; start-up is not counted."""
    for end in range(REWARD_WINDOW, len(steps) + 1):
        if threshold is not None and fmean(s["reward"] for s in steps[end - REWARD_WINDOW : end]) >= threshold:
            return round(sum(step["seconds"] for step in steps[:end]), 2)
    return None


def ratios(contenders: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Podium's in-process engine against the best TRL setting, and against vLLM's tokens a second anywhere here.

    Of what ran on one machine, since machines differ.
    """
    ran = {name: each for name, each in contenders.items() if "failed" not in each}
    ran = {name: each for name, each in ran.items() if "podium" in ran and on_one_machine(each, ran["podium"])}
    trl = [each for name, each in ran.items() if name.startswith("trl")]
    with_vllm = [each for name, each in ran.items() if name == "podium-vllm" or name.startswith("trl")]
    if "podium" not in ran or not with_vllm:
        return {}
    mine = ran["podium"]
    made = {
        "generation_tokens_per_s": mine["generated_tokens_per_s"] / max(e["generated_tokens_per_s"] for e in with_vllm),
        "mismatch": mine["mismatch_abs_mean"] / min(e["mismatch_abs_mean"] for e in with_vllm),
    }
    if trl:
        best = min(trl, key=lambda each: each["seconds_median"])
        made["step_seconds"] = best["seconds_median"] / mine["seconds_median"]
        made["peak_memory"] = mine["peak_memory_gb"] / best["peak_memory_gb"]
        for name in ("podium-overlap",):
            if name in ran:
                made[f"step_seconds_{name}"] = best["seconds_median"] / ran[name]["seconds_median"]
    return {name: round(value, 3) for name, value in made.items()}


def on_one_machine(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """As far as is known: earlier rows do not tell."""
    return one["versions"].get("gpu_id") == other["versions"].get("gpu_id")


def table(model: str, measured: Mapping[str, Any]) -> str:
    columns = {
        "s/step": ("seconds_median", "{:.3f}"),
        "generation s": ("generation_s_median", "{:.3f}"),
        "tokens/s": ("generated_tokens_per_s", "{:,.0f}"),
        "training s": ("training_s_median", "{:.3f}"),
        "MFU": ("mfu", "{:.0%}"),
        "trained tok/s": ("trained_tokens_per_s", "{:,.0f}"),
        "tokens/step": ("generated_tokens_mean", "{:,.0f}"),
        "peak GB": ("peak_memory_gb", "{:.1f}"),
        "mismatch": ("mismatch_abs_mean", "{:.5f}"),
        "reward": ("reward_last", "{:.3f}"),
        "to threshold s": ("seconds_to_threshold", "{}"),
    }
    lines = [f"\n{model:<14}" + "".join(f"{title:>15}" for title in columns)]
    for name, told in measured["contenders"].items():
        facts = dict(told)
        if "trained_tokens_per_s" in facts:
            passed = facts.get("passed_tokens_per_s", facts["trained_tokens_per_s"])
            operations = 4 if measured["workload"].get("lora") else 6  # frozen weights need no gradient
            facts["mfu"] = operations * measured.get("parameters", 0) * passed / PEAK_FLOPS
        cells = ["failed"] if "failed" in facts else [form.format(facts[key]) for key, form in columns.values()]
        lines.append(f"{name:<14}" + "".join(f"{cell:>15}" for cell in cells))
    return "\n".join([*lines, f"ratios: {measured.get('ratios')}"])


def random_model(model: str, tokenizer: Path, scratch: str) -> Path:
    """A folder with random weights of the model's shape, in bfloat16 as such models are published."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(SEED)
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config_of(WORKLOADS[model]), dtype=torch.bfloat16)
    made.save_pretrained(scratch)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(scratch)
    del made
    torch.cuda.empty_cache()
    return Path(scratch)


def config_of(work: Workload) -> Any:
    """Of a model of this shape."""
    import torch
    from transformers import Qwen3Config

    assert work.shape is not None
    tied = work.shape["hidden_size"] < 4096
    return Qwen3Config(**work.shape, tie_word_embeddings=tied, max_position_embeddings=8192, dtype=torch.bfloat16)


def count_parameters(folder: Path) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).num_parameters()


def versions() -> dict[str, str]:
    import torch

    import podium

    found = {
        "python": platform.python_version(),
        "podium": podium.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    if torch.cuda.is_available():
        found["gpu_id"] = str(getattr(torch.cuda.get_device_properties(0), "uuid", "unknown"))[:8]
    for name in ("torch", "transformers", "trl", "vllm", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# ── A process that trains ─────────────────────────────────────────────────────────────────────────────────────────


def run_contender(args: argparse.Namespace) -> None:
    model, num_steps = args.models[0], args.warmup + args.steps
    if args.contender.startswith("podium"):
        run_podium(WORKLOADS[model], args.folder, num_steps, variant=args.contender.removeprefix("podium"))
    else:
        run_trl(WORKLOADS[model], args.folder, num_steps, **trl_settings(args.contender))


def trl_settings(contender: str) -> dict[str, Any]:
    if contender == TRL_AS_DOCUMENTED:
        return {"micro_batch": TRL_DEFAULT_BATCH, "gradient_checkpointing": True}
    return {"micro_batch": int(contender.removeprefix("trl-"))}


def memory_gb() -> float:
    """What the whole GPU has given away."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def tell(step: Step) -> None:
    with Path(os.environ["STEPS_FILE"]).open("a") as lines:
        lines.write(json.dumps(step) + "\n")


@runs_inline
@declare_range(0.0, 1.0)
def hash_reward(prompt: Any, rollout: Any) -> float:
    """Between 0 and 1, by the text alone."""
    return zlib.crc32(rollout.text.encode()) % 1000 / 1000


def run_podium(work: Workload, folder: Path, num_steps: int, *, variant: str) -> None:
    """A plain run through the public entry point, with `Clock` as a report."""
    import podium

    here = Path(__file__).resolve()
    reward: dict[str, Any] = {"name": f"{here}:hash_reward"}
    if work.reward == "arithmetic":
        reward = {"name": "arithmetic_lax"}
    is_overlapped = variant == "-overlap"
    vllm = {
        "name": "vllm_local",
        "memory_share": VLLM_MEMORY_SHARE,
        "concurrency": 512,
        "max_context_tokens": work.context,
    }
    with tempfile.TemporaryDirectory() as scratch:
        tables = {
            "run": {
                "folder": f"{scratch}/run",
                "steps": num_steps + is_overlapped,  # its last step has no other to sample beside it, and is not told
                "seed": SEED,
                "prompts_per_step": work.prompts_per_step,
                "rollouts_per_prompt": GROUP_SIZE,
                "max_lag": 1 if is_overlapped else 0,
            },
            "model": {
                "name": str(folder),
                "dtype": "bfloat16" if work.lora else "float32",
                "device": "cuda",
                "lora": {"r": LORA_RANK, "alpha": 2 * LORA_RANK} if work.lora else False,
            },
            "data": [{"name": "sums"}],
            "reward": [reward],
            "rollout": {"temperature": 1.0, "max_new_tokens": work.max_new_tokens, "system": SYSTEM},
            "engine": vllm if variant == "-vllm" else {"name": "inprocess"},
            "filter": {"accept": "all"},
            "pack": {"shared_prefix": True},
            "trainer": {"lr": LEARNING_RATE, "precision": "bfloat16"},
            "checkpoint": {"every": 0, "keep": 1},
            "report": [{"name": f"{here}:Clock", "steps": num_steps}],
        }
        podium.train(podium.Settings.from_dict(tables))


class Clock:
    """A report of Podium that tells each of so many steps. Rollouts and metrics have been written by then."""

    def __init__(self, *, steps: int) -> None:
        self._left = steps

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        self._last = time.perf_counter()

    def write(self, report: Any) -> None:
        self._left -= 1
        if self._left < 0:
            return
        now, metrics = time.perf_counter(), report.metrics
        rollouts = [(group.prompt, rollout) for group in report.groups for rollout in group.rollouts]
        generated = sum(len(rollout.token_ids) for _, rollout in rollouts)
        tell(
            {
                "seconds": now - self._last,
                "generation_s": metrics["time/engine_s"],
                "training_s": metrics["time/train_s"],
                "generated_tokens": generated,
                "trained_tokens": generated + sum(len(prompt.token_ids) for prompt, _ in rollouts),
                "passed_tokens": metrics["pack/tokens"],
                "updates": metrics["optim/updates"],
                "reward": metrics["reward/mean"],
                "mismatch": metrics["mismatch/abs_mean"],
                "memory_gb": memory_gb(),
                **{name: value for name, value in metrics.items() if name.startswith("time/")},
            }
        )
        self._last = now

    def evaluated(self, report: Any) -> None:
        raise AssertionError("nothing is evaluated here")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Every step has been told."""

    def fail(self) -> None:
        """The traceback says it."""


def run_trl(
    work: Workload, folder: Path, num_steps: int, *, micro_batch: int, gradient_checkpointing: bool = False
) -> None:
    """The same prompts in the same order through `GRPOTrainer`, with vLLM in its process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = podium_prompts(tokenizer, work, num_steps)
    rows = [
        {"prompt": [SYSTEM_TURN, *map(dict, p.messages)], "answer": p.answer, "prompt_tokens": len(p.token_ids)}
        for p in prompts
    ]
    clock = make_trl_clock(work)
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.bfloat16 if work.lora else torch.float32, attn_implementation="sdpa"
            ),
            peft_config=trl_adapter() if work.lora else None,
            reward_funcs=clock.reward,
            args=own_trl_config(work, output, num_steps, micro_batch, gradient_checkpointing=gradient_checkpointing),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        ids = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        assert [tuple(each) for each in ids] == [prompt.token_ids for prompt in prompts], "the prompts' ids differ"
        clock.watch(trainer)
        trainer.train()


def trl_adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM")


def podium_prompts(tokenizer: Any, work: Workload, num_steps: int, system: str = SYSTEM) -> list[Any]:
    """The prompts of Podium's first steps, in its order."""
    from podium.data.arithmetic import arithmetic
    from podium.data.build import OrderedData, Source
    from podium.records import Plan, RunState
    from podium.settings.sections import DataSource

    rows = arithmetic(operations="+")
    plan = Plan(num_steps, work.prompts_per_step, GROUP_SIZE)
    data = OrderedData([Source(DataSource(), rows)], tokenizer, plan, SEED, 4096, system)
    return data.draw(RunState(), num_steps * work.prompts_per_step)


def own_trl_config(work: Workload, output: str, num_steps: int, micro_batch: int, **others: Any) -> Any:
    """With vLLM in its process, and so many rollouts in a pass."""
    return trl_config(
        output,
        num_steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=work.prompts_per_step * GROUP_SIZE // micro_batch,
        num_generations=GROUP_SIZE,
        max_completion_length=work.max_new_tokens,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        bf16=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=VLLM_MEMORY_SHARE,
        vllm_max_model_length=work.context,
        seed=SEED,
        **others,
    )


def make_trl_clock(work: Workload) -> Any:
    """A callback that tells each step, and the reward function, which sees the step's answers."""
    import torch
    from transformers import TrainerCallback

    from podium.reward.arithmetic_lax import arithmetic_lax

    class TrlClock(TrainerCallback):
        def __init__(self) -> None:
            self._facts: Step = {}
            self._generation_s = 0.0

        def watch(self, trainer: Any) -> None:
            """Takes the time of what the trainer does to get its rollouts: weights to vLLM, and writing."""
            self._trainer, generate = trainer, trainer._generate

            def timed(*args: Any, **kwargs: Any) -> Any:
                started = time.perf_counter()
                result = generate(*args, **kwargs)
                torch.cuda.synchronize()
                self._generation_s += time.perf_counter() - started
                return result

            trainer._generate = timed

        def reward(self, completions, completion_ids, answer, prompt_tokens, **others) -> list[float]:
            rewards = []
            for turns, right in zip(completions, answer, strict=True):
                rollout = SimpleNamespace(text=turns[-1]["content"])
                prompt: Any = SimpleNamespace(answer=right)
                rewards.append(
                    arithmetic_lax(prompt, rollout)  # type: ignore[arg-type]
                    if work.reward == "arithmetic"
                    else hash_reward(prompt, rollout)
                )
            generated = sum(map(len, completion_ids))
            trained = generated + sum(prompt_tokens)
            counts = {"generated_tokens": generated, "trained_tokens": trained, "passed_tokens": trained}
            self._facts = {"reward": fmean(rewards), **counts}
            return rewards

        def on_train_begin(self, args, state, control, **others) -> None:
            self._last = time.perf_counter()

        def on_step_end(self, args, state, control, **others) -> None:
            torch.cuda.synchronize()
            seconds = time.perf_counter() - self._last
            gap = self._trainer._metrics["train"].get("sampling/sampling_logp_difference/mean", [float("nan")])
            tell(
                self._facts
                | {
                    "seconds": seconds,
                    "generation_s": self._generation_s,
                    "training_s": seconds - self._generation_s,
                    "updates": 1.0,
                    "mismatch": gap[-1],
                    "memory_gb": memory_gb(),
                }
            )
            self._generation_s, self._last = 0.0, time.perf_counter()

    return TrlClock()
