"""The README of an exported model: what it is, where it comes from, its results and how to load it."""

import math
from typing import Any

import tomli_w

from podium.run.folder import Ledger, RunFolder
from podium.settings.tables import read_run_settings

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 280, 48, 12, 14, 36

LOAD_ADAPTER = """from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)"""
LOAD_MODEL = """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")"""


def model_card(run: RunFolder | None, base: str, kind: str, step: int | None) -> str:
    """`kind` is "adapter" or "model"; without a run, the card has no results and no settings."""
    parts = [_front_matter(base, kind), f"# {_title(run, base)}", _what(run, base, kind, step)]
    if run is not None:
        parts += [*_results(run, step), _training(run)]
    return "\n\n".join([*parts, _loading(kind)]) + "\n"


def curve(run: RunFolder, until: int | None = None) -> str | None:
    """An SVG chart of accuracy by step: held-out, with its interval, and in training; None if unknown."""
    lines = _history(run, until)
    held_out = [line for line in lines if "eval/accuracy" in line]
    sampled = [(line["step"], line["reward/correct_rate"]) for line in lines if "reward/correct_rate" in line]
    points = [(line["step"], line["eval/accuracy"]) for line in held_out]
    last = max((step for step, _ in [*points, *sampled]), default=0)
    if not points or not last:
        return None

    def x(step: float) -> float:
        return round(LEFT + step / last * (WIDTH - LEFT - RIGHT), 1)

    def y(value: float) -> float:
        return round(HEIGHT - BOTTOM - value * (HEIGHT - BOTTOM - TOP), 1)

    def line_through(places: list[tuple[float, float]], colour: str) -> str:
        path = " ".join(f"{x(step)},{y(value)}" for step, value in places)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'

    marks = [
        _text(LEFT - 6, y(v) + 4, f"{v:g}", "end") + _line(LEFT, WIDTH - RIGHT, y(v)) for v in (0, 0.25, 0.5, 0.75, 1)
    ]
    marks += [_text(x(step), HEIGHT - BOTTOM + 18, str(step)) for step in range(0, last + 1, math.ceil(last / 5))]
    whiskers = [
        f'<line x1="{x(each["step"])}" x2="{x(each["step"])}" y1="{y(each["eval/accuracy_low"])}" '
        f'y2="{y(each["eval/accuracy_high"])}" stroke="#c2570c"/>'
        for each in held_out
        if "eval/accuracy_low" in each
    ]
    legend = _text(WIDTH - 20, HEIGHT - 84, "held out", "end", "#c2570c")
    legend += _text(WIDTH - 20, HEIGHT - 64, "sampled in training", "end", "#1f5fd1")
    body = [*marks, line_through(sampled, "#1f5fd1"), line_through(points, "#c2570c"), *whiskers, legend]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return f'{head}<rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n'


def _text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#555") -> str:
    return f'<text x="{x}" y="{y}" font-size="13" text-anchor="{anchor}" fill="{colour}">{words}</text>'


def _line(x1: float, x2: float, y: float) -> str:
    return f'<line x1="{x1}" x2="{x2}" y1="{y}" y2="{y}" stroke="#ddd"/>'


def _front_matter(base: str, kind: str) -> str:
    """The metadata that the model hub reads."""
    library = "peft" if kind == "adapter" else "transformers"
    lines = [f"library_name: {library}", "pipeline_tag: text-generation", "tags: [podium, reinforcement-learning]"]
    if base.count("/") == 1 and not base.startswith((".", "/", "~")):  # a hub name
        lines.insert(0, f"base_model: {base}")
    return "\n".join(["---", *lines, "---"])


def _title(run: RunFolder | None, base: str) -> str:
    name = run.path.resolve().name if run else "adapter"
    return f"{name}: {base.rstrip('/').rpartition('/')[2]} trained by reinforcement learning"


def _what(run: RunFolder | None, base: str, kind: str, step: int | None) -> str:
    form = "A LoRA adapter over" if kind == "adapter" else "Plain weights, trained from"
    when = "" if step is None else f", as it was after step {step}"
    if run is None:
        return f"{form} `{base}`{when}."
    tables = read_run_settings(run.settings)
    rewards = ", ".join(f"`{table['name']}`" for table in tables.get("reward", [])) or "those that its rows name"
    data = ", ".join(f"`{table.get('path', table['name'])}`" for table in tables.get("data", []))
    loss = tables.get("loss", {}).get("name", "grpo")
    return f"{form} `{base}`{when}. Data: {data}. Rewards: {rewards}. Loss: `{loss}`."


def _history(run: RunFolder, until: int | None) -> list[dict[str, Any]]:
    return [line for line in Ledger(run).history() if until is None or line["step"] <= until]


def _results(run: RunFolder, until: int | None) -> list[str]:
    """Accuracy before and after, and the curve."""
    evals = [line for line in _history(run, until) if line.get("eval") and "eval/accuracy" in line]
    if not evals:
        return []
    rows = [f"| {line['step']} | {line['eval/accuracy']:.3f} | {_interval(line)} |" for line in evals]
    table = "\n".join(["| step | held-out accuracy | 95 % interval |", "|---|---|---|", *rows])
    first, last = evals[0]["eval/accuracy"], evals[-1]["eval/accuracy"]
    prompts = int(evals[-1]["eval/prompts"])
    said = f"Held-out accuracy on {prompts} prompts: {first:.3f} before, {last:.3f} after."
    picture = ["![accuracy by step](curve.svg)"] if curve(run, until) else []
    return ["## Results", said, table, *picture]


def _interval(line: dict[str, Any]) -> str:
    low, high = line.get("eval/accuracy_low"), line.get("eval/accuracy_high")
    return f"{low:.3f} to {high:.3f}" if low is not None and high is not None else ""


def _training(run: RunFolder) -> str:
    """The settings in full, without the run's folder."""
    tables = read_run_settings(run.settings)
    tables["run"] = {key: value for key, value in tables.get("run", {}).items() if key != "folder"}
    shown = tomli_w.dumps(tables).strip()
    return f"## Settings\n\n<details><summary>settings.toml</summary>\n\n```toml\n{shown}\n```\n\n</details>"


def _loading(kind: str) -> str:
    code = LOAD_ADAPTER if kind == "adapter" else LOAD_MODEL
    serve = "podium serve THIS_FOLDER --token-file token" if kind == "adapter" else "vllm serve THIS_FOLDER"
    return f"## Load it\n\n```python\n{code}\n```\n\nor serve it: `{serve}`."
