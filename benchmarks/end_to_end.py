"""Seconds per training step of Podium and of TRL's GRPOTrainer, on the same work, on the CPU.

    python benchmarks/end_to_end.py                     # LoRA and full weights, a few minutes
    python benchmarks/end_to_end.py --weights lora
    python benchmarks/end_to_end.py --gpu               # TRL with vLLM on one GPU, see _end_to_end_gpu.py

Three contenders: TRL; Podium with equal work (every group is trained, as TRL does); Podium that skips, as by default,
groups whose rewards are all equal. With two threads or more a fourth: Podium with equal work that samples the next step
while it trains this one (`run.max_lag = 1`), its engine a `podium serve` of its own and half of the threads a side.
Podium computes a prompt once for its group (`pack.shared_prefix`). Each contender is a process of its own. They take
turns step by step, one waits (and its server stands still) while another works, so that a machine that is slower for a
while is so for all; and they are started anew several times, since one process can be slower than the next for its
whole life. A step's time is from the end of the step before it to its own end, less the wait: nothing falls between two
steps. Compare the ratios; the seconds are this machine's.
"""

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

from _server import Server, a_server
from _trl_config import trl_config

OVERLAPPED = "podium_overlap"
"""Has one step more than it is measured for: the last step of a run has no other to sample beside it."""
TITLES = {
    "trl": "TRL",
    "podium": "Podium, equal work",
    "podium_skipping": "Podium, skipping",
    OVERLAPPED: "Podium, overlapped",
}
RESULTS = Path(__file__).parent / "results" / "end_to_end_cpu.json"

GROUP_SIZE = 8
TEMPERATURE = 1.0
LEARNING_RATE = 1e-6
"""So small that the policy stays where it is: all contenders write answers of the same length to the end."""
LORA = {"r": 16, "alpha": 32}
SEED = 0
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
"""glibc keeps freed memory for the next allocation. By default it gives large blocks back to the system and takes them
again, a page fault for each page; that slows TRL by about a tenth, in some processes more than in others, and Podium
hardly at all."""

Step = dict[str, float]
"""What a contender tells of one step: its wall-clock and CPU seconds, and how much work it was."""
Round = dict[str, list[Step]]
"""The measured steps of each contender's process."""


@dataclass(frozen=True)
class Work:
    """What every contender does in a process."""

    model: str
    weights: str
    prompts: int
    """Of a step."""
    tokens: int
    """Of an answer, at most."""
    num_steps: int


def main() -> None:
    args = parse_arguments()
    if args.contender:
        run_contender(args)
        return
    runs = {weights: measure(args, weights) for weights in args.weights}
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/end_to_end.py", *sys.argv[1:]]),
        "machine": machine(args),
        "versions": versions(),
        "workload": workload(args),
        "weights": runs,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for weights, run in runs.items():
        print(table(weights, run["summary"]))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", nargs="+", choices=("lora", "full"), default=["lora", "full"])
    parser.add_argument("--model", default="embedded", help="a model folder, to measure at another accuracy")
    parser.add_argument("--prompts", type=int, default=16, help="of a step, with 8 answers each")
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most")
    parser.add_argument("--rounds", type=int, default=4, help="how often each contender is started anew")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each contender in a round")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them, not measured")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each contender")
    parser.add_argument(
        "--malloc", choices=("keep", "default"), default="keep", help="of freed memory, see KEEP_MEMORY"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--contender", choices=tuple(TITLES), help=argparse.SUPPRESS)  # what this process is to run
    parser.add_argument("--server", nargs=2, help=argparse.SUPPRESS)  # its url and process, for the overlapped one
    args = parser.parse_args()
    if args.threads > 1 and args.warmup < 2:
        parser.error("--warmup: with several threads at least 2, since an overlapped run begins by sampling two steps")
    return args


# ── The process that compares ─────────────────────────────────────────────────────────────────────────────────────


def measure(args: argparse.Namespace, weights: str) -> dict[str, Any]:
    """All rounds with one kind of weights."""
    rounds = []
    for number in range(args.rounds):
        rounds.append(run_round(args, weights))
        seconds = ", ".join(f"{TITLES[name]} {median_of(steps, 'seconds'):.3f}" for name, steps in rounds[-1].items())
        print(f"{weights}, round {number + 1} of {args.rounds}, s/step: {seconds}", flush=True)
    listed = [{name: [step["seconds"] for step in steps] for name, steps in round_.items()} for round_ in rounds]
    return {"summary": summarise(rounds), "seconds_by_round": listed}


def run_round(args: argparse.Namespace, weights: str) -> Round:
    """New processes that take turns; who goes first changes from step to step."""
    names = [name for name in TITLES if name != OVERLAPPED or args.threads > 1]
    steps: Round = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder, server = Path(scratch), None
        if OVERLAPPED in names:
            side = os.environ | {"OMP_NUM_THREADS": str(args.threads // 2)}
            server = stack.enter_context(a_server(folder, side, model=args.model))
        contenders = []
        for name in names:
            contenders.append(Contender(args, weights, name, folder, server))
            stack.callback(contenders[-1].stop)
        for number in range(args.warmup + args.steps):
            first = number % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                steps[contender.name].append(contender.take_turn())
    return {name: each[args.warmup :] for name, each in steps.items()}


class Contender:
    """A process that trains one step a turn: a line to its input lets it go, a line of its output is the step."""

    def __init__(self, args: argparse.Namespace, weights: str, name: str, folder: Path, server: Server | None) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        work = ["--prompts", str(args.prompts), "--tokens", str(args.tokens)]
        numbers = [*work, "--steps", str(args.steps), "--warmup", str(args.warmup)]
        command = [sys.executable, str(Path(__file__).resolve()), "--contender", name, "--weights", weights]
        threads = args.threads
        if name == OVERLAPPED and server is not None:
            threads //= 2
            numbers += ["--server", server.url, str(server.pid)]
        own = {"OMP_NUM_THREADS": str(threads), "TMPDIR": str(folder)}  # nothing is left behind when it is killed
        malloc = KEEP_MEMORY if args.malloc == "keep" else {}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--model", args.model, *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **own, **malloc},
            )

    def take_turn(self) -> Step:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            sys.exit(f"{TITLES[self.name]} failed:\n{self._log.read_text(encoding='utf-8', errors='replace')}")

    def stop(self) -> None:
        """It has done its steps and only waits, or the benchmark has failed."""
        self._process.kill()
        self._process.communicate()


def summarise(rounds: Sequence[Round]) -> dict[str, Step]:
    """Medians over the steps of all rounds, the ratio TRL / contender, and that ratio's range over the rounds."""
    pooled: Round = {name: [step for round_ in rounds for step in round_[name]] for name in rounds[0]}
    summary = {}
    for name, own in pooled.items():
        by_round = [ratio(round_["trl"], round_[name], "seconds") for round_ in rounds]
        facts = {
            "seconds_median": median_of(own, "seconds"),
            "trl_ratio": ratio(pooled["trl"], own, "seconds"),
            "trl_ratio_lowest_round": min(by_round),
            "trl_ratio_highest_round": max(by_round),
            "cpu_seconds_median": median_of(own, "cpu_seconds"),
            "trl_cpu_ratio": ratio(pooled["trl"], own, "cpu_seconds"),
            **{f"{key}_mean": fmean(step[key] for step in own) for key in own[0] if "seconds" not in key},
        }
        summary[name] = {key: round(value, 4) for key, value in facts.items()}
    return summary


def median_of(steps: Sequence[Step], key: str) -> float:
    return median(step[key] for step in steps)


def ratio(theirs: Sequence[Step], mine: Sequence[Step], key: str) -> float:
    """How many times as long theirs took."""
    return median_of(theirs, key) / median_of(mine, key)


def table(weights: str, summary: Mapping[str, Step]) -> str:
    """What people read."""
    columns = ("s/step", "TRL/this", "by round", "CPU s/step", "TRL/this", "tokens/answer", "kept")
    widths = (8, 9, 12, 11, 9, 14, 6)

    def line(title: str, cells: Sequence[str]) -> str:
        return f"{title:<20}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    lines = ["", line(f"weights: {weights}", columns)]
    for name, row in summary.items():
        cells = (
            f"{row['seconds_median']:.3f}",
            f"{row['trl_ratio']:.2f}",
            f"{row['trl_ratio_lowest_round']:.2f}–{row['trl_ratio_highest_round']:.2f}",
            f"{row['cpu_seconds_median']:.3f}",
            f"{row['trl_cpu_ratio']:.2f}",
            f"{row['answer_tokens_mean']:.2f}",
            f"{row['kept_ratio_mean']:.2f}",
        )
        lines.append(line(TITLES[name], cells))
    kept = summary["podium_skipping"]["kept_ratio_mean"]
    return "\n".join([*lines, f"Skipping was measured at a kept_ratio of {kept:.2f}."])


def workload(args: argparse.Namespace) -> dict[str, Any]:
    """What every contender did."""
    return {
        "model": args.model,
        "dtype": "float32",
        "data": "arithmetic, train split",
        "prompts_per_step": args.prompts,
        "group_size": GROUP_SIZE,
        "max_new_tokens": args.tokens,
        "temperature": TEMPERATURE,
        "lr": LEARNING_RATE,
        "lora": LORA,
        "rounds": args.rounds,
        "measured_steps_per_round": args.steps,
        "warmup_steps_per_round": args.warmup,
    }


def versions() -> dict[str, str]:
    import podium

    names = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
    return {
        "python": platform.python_version(),
        "podium": podium.__version__,
        **{name: version(name) for name in names},
    }


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """The processor's name only where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpu_count": os.cpu_count(),
        "threads": args.threads,
        "malloc": args.malloc,
        "system": f"{platform.system()} {platform.machine()}",
    }


# ── A process that trains ─────────────────────────────────────────────────────────────────────────────────────────


def run_contender(args: argparse.Namespace) -> None:
    """Standard output is kept for the steps; what libraries print goes where errors go."""
    pipe = os.dup(1)
    os.dup2(2, 1)
    work = Work(args.model, args.weights[0], args.prompts, args.tokens, args.warmup + args.steps)
    if args.contender == "trl":
        run_trl(work, pipe)
    elif args.contender == OVERLAPPED:
        url, pid = args.server
        run_podium(replace(work, num_steps=work.num_steps + 1), pipe, server=Server(url, int(pid)))
    else:
        run_podium(work, pipe, skipping=args.contender == "podium_skipping")


class Turns:
    """The contender's side of `Contender`: waits for its turn, and tells what the step took.

    `server` is the process that works for it, which stands still between its turns.
    """

    def __init__(self, pipe: int, server: int | None = None) -> None:
        self._pipe, self._server = pipe, server

    def wait(self) -> None:
        sys.stdin.readline()
        self._tell_server(signal.SIGCONT)
        self._wall, self._cpu = time.perf_counter(), self._cpu_seconds()

    def end_step(self, facts: Step) -> None:
        self._tell_server(signal.SIGSTOP)
        seconds = {"seconds": time.perf_counter() - self._wall, "cpu_seconds": self._cpu_seconds() - self._cpu}
        step = {key: round(value, 5) for key, value in {**seconds, **facts}.items()}
        os.write(self._pipe, (json.dumps(step) + "\n").encode())
        self.wait()

    def _tell_server(self, what: signal.Signals) -> None:
        if self._server is not None:
            os.kill(self._server, what)

    def _cpu_seconds(self) -> float:
        return time.process_time() + (0.0 if self._server is None else cpu_seconds_of(self._server))


def cpu_seconds_of(pid: int) -> float:
    """Of another process, in user and system mode, as Linux tells them."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_podium(work: Work, pipe: int, *, skipping: bool = False, server: Server | None = None) -> None:
    """A plain run through the public entry point, with `Clock` as a report; one step ahead where a server samples."""
    import podium

    clock = {"name": f"{Path(__file__).resolve()}:Clock", "pipe": pipe}
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "run": {
                "folder": f"{folder}/run",
                "steps": work.num_steps,
                "seed": SEED,
                "prompts_per_step": work.prompts,
                "rollouts_per_prompt": GROUP_SIZE,
                "max_lag": 0 if server is None else 1,
            },
            "model": {"name": work.model, "device": "cpu", "lora": LORA if work.weights == "lora" else False},
            "data": [{"name": "arithmetic"}],
            "reward": [{"name": "arithmetic"}],
            "rollout": {"temperature": TEMPERATURE, "max_new_tokens": work.tokens},
            "engine": {"name": "inprocess"} if server is None else engine_at(server),
            "filter": {"accept": "signal" if skipping else "all"},
            "pack": {"shared_prefix": True},
            "trainer": {"lr": LEARNING_RATE},
            "checkpoint": {"every": 0},
            "report": [clock if server is None else clock | {"server": server.pid}],
        }
        podium.train(podium.Settings.from_dict(tables))


def engine_at(server: Server) -> dict[str, Any]:
    """`silence_s`: it may stand still for long."""
    return {"name": "vllm_server", "url": server.url, "silence_s": 3600}


class Clock:
    """A report of Podium that ends the turn with each step. Rollouts and metrics have been written by then."""

    def __init__(self, *, pipe: int, server: int | None = None) -> None:
        self._turns = Turns(pipe, server)

    def start(self, card: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
        self._turns.wait()

    def write(self, report: Any) -> None:
        facts = {
            "answer_tokens": report.metrics["rollout/length_mean"],
            "reward": report.metrics["reward/mean"],
            "kept_ratio": report.metrics["batch/kept_ratio"],
        }
        self._turns.end_step(facts)

    def evaluated(self, report: Any) -> None:
        raise AssertionError("nothing is evaluated here")

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Every step has been told."""

    def fail(self) -> None:
        """The traceback says it."""


def run_trl(work: Work, pipe: int) -> None:
    """The same prompts in the same order through `GRPOTrainer`."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOTrainer

    from podium.model.load import model_folder

    folder = model_folder(work.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    prompts = podium_prompts(tokenizer, work)
    rows = [
        {"prompt": [dict(turn) for turn in prompt.messages], "answer": prompt.answer, "ordinal": prompt.ordinal}
        for prompt in prompts
    ]
    adapter = LoraConfig(r=LORA["r"], lora_alpha=LORA["alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
    clock = make_trl_clock(Turns(pipe), work.prompts)
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa"),
            reward_funcs=clock.reward,
            args=own_trl_config(output, work),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
            peft_config=adapter if work.weights == "lora" else None,
        )
        ids = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
        assert [tuple(each) for each in ids] == [prompt.token_ids for prompt in prompts], "the prompts' ids differ"
        trainer.train()


def podium_prompts(tokenizer: Any, work: Work) -> list[Any]:
    """The prompts of Podium's first steps, in its order."""
    from podium.data.arithmetic import arithmetic
    from podium.data.build import OrderedData, Source
    from podium.records import Plan, RunState
    from podium.settings.sections import DataSource

    rows = arithmetic()
    plan = Plan(work.num_steps, work.prompts, GROUP_SIZE)
    source = Source(DataSource(name="rows"), rows)
    data = OrderedData([source], tokenizer, plan, SEED, fits=tokenizer.model_max_length)
    return data.draw(RunState(), work.num_steps * work.prompts)


def own_trl_config(output: str, work: Work) -> Any:
    """The whole step is one batch, on the CPU."""
    return trl_config(
        output,
        work.num_steps,
        per_device_train_batch_size=work.prompts * GROUP_SIZE,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=work.tokens,
        temperature=TEMPERATURE,
        learning_rate=LEARNING_RATE,
        bf16=False,
        use_cpu=True,
        use_vllm=False,
        seed=SEED,
    )


def make_trl_clock(turns: Turns, prompts: int) -> Any:
    """A callback that ends the turn with each step, and the reward function, which sees the step's answers."""
    from transformers import TrainerCallback

    from podium.reward.arithmetic import arithmetic

    class TrlClock(TrainerCallback):
        def __init__(self) -> None:
            self._facts: Step = {}

        def reward(self, completions, completion_ids, answer, ordinal, trainer_state, **others) -> list[float]:
            first = trainer_state.global_step * prompts
            assert ordinal[::GROUP_SIZE] == list(range(first, first + prompts)), "not Podium's prompts"
            rewards = [
                arithmetic(SimpleNamespace(answer=right), SimpleNamespace(text=turns[-1]["content"]))  # type: ignore[arg-type]
                for turns, right in zip(completions, answer, strict=True)
            ]
            lengths = map(len, completion_ids)
            self._facts = {"answer_tokens": fmean(lengths), "reward": fmean(rewards), "kept_ratio": 1.0}
            return rewards

        def on_train_begin(self, args, state, control, **others) -> None:
            turns.wait()

        def on_step_end(self, args, state, control, **others) -> None:
            turns.end_step(self._facts)

    return TrlClock()


if __name__ == "__main__":
    if "--gpu" in sys.argv:
        import _end_to_end_gpu

        _end_to_end_gpu.main(sys.argv[1:])
    else:
        main()
