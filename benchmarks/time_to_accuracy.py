"""How long until it can do it: held-out accuracy over training time, Podium and TRL with vLLM colocated, on one GPU.

    python benchmarks/time_to_accuracy.py                               # every contender that is missing
    python benchmarks/time_to_accuracy.py --contenders podium --again

SmolLM2-135M-Instruct learns two-digit sums from a strict reward: 0.2 if a number follows the last `####`, 1.0 more if
it is the right one. Same prompts in the same order, group size, longest answer, learning rate and its schedule, AdamW,
bfloat16 products over float32 weights, on both sides; otherwise each as its users run it. Accuracy is that of greedy
answers to the held-out sums. Training time is that of the steps, the first of which compiles; wall time counts from
the start of the process, loading and evaluations included. TRL stops once it has trained for `--limit` seconds.
`podium-overlap` writes the rollouts of the next step while it trains this one; nothing is written during an evaluation.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _end_to_end_gpu import GROUP_SIZE, VLLM_MEMORY_SHARE, Workload, now, podium_prompts, tell, versions
from _trl_config import trl_config

RESULTS = Path(__file__).parent / "results" / "time_to_accuracy_h200.json"
WORK = Workload(prompts_per_step=64, max_new_tokens=128, reward="arithmetic")
SYSTEM = """You add two numbers. Example:
What is 12 + 30?
12 + 30 = 42
#### 42
Answer every question in exactly this form."""
LEARNING_RATE, BETAS, NUM_STEPS, SEED = 2e-5, (0.9, 0.95), 300, 0
ACCURACIES = (0.9, 0.97)
LONGEST_S = 900
"""For one contender."""
EVAL_EVERY = {"podium": 10, "podium-overlap": 10, "trl-128": 4}
"""Steps; TRL's are so much longer."""


def main() -> None:
    args = parse_arguments()
    if args.contender:
        began = time.perf_counter()
        (run_podium if args.contender.startswith("podium") else run_trl)(args, began)
        return
    found: dict[str, Any] = json.loads(args.out.read_text(encoding="utf-8")) if args.out.is_file() else {}
    for contender in args.contenders:
        if contender not in found or "failed" in found[contender] or args.again:
            found[contender] = measure(args, contender)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(
            contender,
            json.dumps({k: v for k, v in found[contender].items() if k not in ("versions", "seconds", "rewards")}),
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=tuple(EVAL_EVERY), default=list(EVAL_EVERY))
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="over which the learning rate falls to 0")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of training after which TRL stops")
    parser.add_argument("--device", default="cuda", help="cpu: to try the benchmark itself")
    parser.add_argument("--smollm2", type=Path, default=Path.home() / "smollm2-135m", help="folder of the model")
    parser.add_argument("--again", action="store_true", help="measure also what the results hold already")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--contender", choices=tuple(EVAL_EVERY), help=argparse.SUPPRESS)  # what this process runs
    return parser.parse_args()


def measure(args: argparse.Namespace, contender: str) -> dict[str, Any]:
    """Runs one contender to its end; what it printed is shown if it fails."""
    numbers = ["--steps", str(args.steps), "--lr", str(args.lr), "--limit", str(args.limit)]
    command = [sys.executable, str(Path(__file__).resolve()), "--contender", contender, *numbers]
    with tempfile.TemporaryDirectory() as scratch:
        lines = Path(scratch) / "steps.jsonl"
        own = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "TMPDIR": scratch, "STEPS_FILE": str(lines), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(
            [*command, "--device", args.device, "--smollm2", str(args.smollm2)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **own},
            timeout=900,
            check=False,
        )
        told = [json.loads(line) for line in lines.read_text().splitlines()] if lines.is_file() else []
    if done.returncode:
        print(done.stdout[-3000:])
    failed = {"failed": done.stdout.strip().splitlines()[-1:]} if done.returncode else {}
    return (
        failed | summarise(told) | {"command": " ".join(["python", *sys.argv]), "date": now(), "versions": versions()}
    )


def summarise(told: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The curve, and when each accuracy was first reached."""
    curve = [line for line in told if "accuracy" in line]
    steps = [line for line in told if "seconds" in line]
    reached = {}
    for wanted in ACCURACIES:
        first = next((line for line in curve if line["accuracy"] >= wanted), None)
        reached[str(wanted)] = first and {key: first[key] for key in ("step", "training_s", "wall_s")}
    return {
        "reached": reached,
        "last_accuracy": curve[-1]["accuracy"] if curve else None,
        "steps": len(steps),
        "training_s": round(sum(line["seconds"] for line in steps), 2),
        "first_step_s": round(steps[0]["seconds"], 2) if steps else None,
        "curve": [[line["step"], line["training_s"], line["wall_s"], line["accuracy"]] for line in curve],
        "seconds": [round(line["seconds"], 3) for line in steps],
        "rewards": [round(line["reward"], 3) for line in steps],
    }


class Watch:
    """Tells steps and accuracies, with the time that steps took so far and the time since the process began."""

    def __init__(self, began: float) -> None:
        self._began, self._training_s = began, 0.0
        self.restart()

    def restart(self) -> None:
        """What came before was no training."""
        self._last = time.perf_counter()

    def step(self, reward: float, evaluation_s: float = 0.0) -> float:
        """`evaluation_s`: of the time since the last step, what was no training."""
        seconds = time.perf_counter() - self._last - evaluation_s
        self._training_s += seconds
        tell({"seconds": seconds, "reward": reward})
        self.restart()
        return self._training_s

    def accuracy(self, step: int, value: float) -> None:
        wall = time.perf_counter() - self._began
        tell({"step": step, "accuracy": value, "training_s": round(self._training_s, 2), "wall_s": round(wall, 2)})


def run_podium(args: argparse.Namespace, began: float) -> None:
    """A plain run through the public entry point, with `Report` as a report."""
    import podium

    data = {"name": "sums"}
    with tempfile.TemporaryDirectory() as scratch:
        tables = {
            "run": {
                "folder": f"{scratch}/run",
                "steps": args.steps,
                "seed": SEED,
                "prompts_per_step": WORK.prompts_per_step,
                "rollouts_per_prompt": GROUP_SIZE,
                "max_lag": 1 if args.contender == "podium-overlap" else 0,
            },
            "model": {"name": str(args.smollm2), "dtype": "float32", "device": args.device, "lora": False},
            "data": [data],
            "reward": [{"name": "arithmetic"}],
            "rollout": {"temperature": 1.0, "max_new_tokens": WORK.max_new_tokens, "system": SYSTEM},
            "trainer": {
                "lr": args.lr,
                "schedule": "linear",
                "betas": BETAS,
                "precision": "bfloat16" if args.device == "cuda" else "float32",
            },
            "eval": {"every": EVAL_EVERY[args.contender], "data": [data | {"split": "held_out"}]},
            "checkpoint": {"every": 0},
            "report": [{"name": f"{Path(__file__).resolve()}:Report", "began": began}],
        }
        podium.train(podium.Settings.from_dict(tables))


class Report:
    """Of Podium; it tells what `Watch` tells."""

    def __init__(self, *, began: float) -> None:
        self._began = began

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        self._watch = Watch(self._began)

    def write(self, report: Any) -> None:
        self._watch.step(report.metrics["reward/mean"], report.metrics.get("time/eval_s", 0.0))

    def evaluated(self, report: Any) -> None:
        self._watch.accuracy(report.step, report.metrics["eval/accuracy"])
        if report.step == 0:
            self._watch.restart()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Everything has been told."""

    def fail(self) -> None:
        """The traceback says it."""


def run_trl(args: argparse.Namespace, began: float) -> None:
    """The same prompts in the same order through `GRPOTrainer`, with vLLM in its process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(args.smollm2, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # as TRL does
    system = {"role": "system", "content": SYSTEM}
    prompts = podium_prompts(tokenizer, WORK, args.steps, SYSTEM)
    rows = [{"prompt": [system, *map(dict, prompt.messages)], "answer": prompt.answer} for prompt in prompts]
    callback = make_callback(args, Watch(began), tokenizer)
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.smollm2, dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=callback.reward,
            args=own_trl_config(args, output, micro_batch=int(args.contender.partition("-")[2])),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[callback],
        )
        ids = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        assert [tuple(each) for each in ids] == [prompt.token_ids for prompt in prompts], "the prompts' ids differ"
        trainer.train()


def own_trl_config(args: argparse.Namespace, output: str, micro_batch: int) -> Any:
    return trl_config(
        output,
        args.steps,
        lr_scheduler_type="linear",
        adam_beta2=BETAS[1],
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=WORK.prompts_per_step * GROUP_SIZE // micro_batch,
        num_generations=GROUP_SIZE,
        max_completion_length=WORK.max_new_tokens,
        temperature=1.0,
        learning_rate=args.lr,
        bf16=args.device == "cuda",
        use_cpu=args.device == "cpu",
        use_vllm=args.device == "cuda",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=VLLM_MEMORY_SHARE,
        vllm_max_model_length=2048,
        seed=SEED,
    )


def make_callback(args: argparse.Namespace, watch: Watch, tokenizer: Any) -> Any:
    """Scores answers, tells each step, and has the held-out sums answered now and then."""
    import torch
    from transformers import TrainerCallback

    from podium.data.arithmetic import arithmetic as sums
    from podium.reward.arithmetic import arithmetic

    def score(text: str, answer: Any) -> float:
        return arithmetic(SimpleNamespace(answer=answer), SimpleNamespace(text=text))  # type: ignore[arg-type]

    rows = sums("+", split="held_out")
    system = {"role": "system", "content": SYSTEM}
    chats = [[system, *map(dict, row.messages)] for row in rows]
    held_out = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
    )

    @torch.no_grad()
    def held_out_accuracy(model: Any) -> float:
        """Of greedy answers by the model itself; vLLM may be behind by a step."""
        model.eval()
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.device == "cuda"):
            written = model.generate(
                **held_out.to(model.device), max_new_tokens=WORK.max_new_tokens, do_sample=False, use_cache=True
            )
        model.train()
        texts = tokenizer.batch_decode(written[:, held_out["input_ids"].shape[1] :], skip_special_tokens=True)
        return sum(score(text, row.answer) > 1 for text, row in zip(texts, rows, strict=True)) / len(rows)

    class Told(TrainerCallback):
        reward_mean = 0.0

        def reward(self, completions, answer, **others) -> list[float]:
            rewards = [score(turns[-1]["content"], right) for turns, right in zip(completions, answer, strict=True)]
            self.reward_mean = sum(rewards) / len(rewards)
            return rewards

        def on_train_begin(self, arguments, state, control, model=None, **others) -> None:
            watch.accuracy(0, held_out_accuracy(model))
            watch.restart()

        def on_step_end(self, arguments, state, control, model=None, **others) -> None:
            if args.device == "cuda":
                torch.cuda.synchronize()
            is_over = watch.step(self.reward_mean) > args.limit
            if is_over or state.global_step % EVAL_EVERY[args.contender] == 0:
                watch.accuracy(state.global_step, held_out_accuracy(model))
                watch.restart()
            control.should_training_stop = is_over

    return Told()


if __name__ == "__main__":
    main()
