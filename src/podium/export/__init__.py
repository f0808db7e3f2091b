"""`podium export` and `podium push`: what a run trained, as a folder that others can load, or on the model hub.

The folder holds the adapter, or merged plain weights, and a model card. Merged weights are written, loaded again by
transformers alone and compared with base + adapter before the folder gets its final name. So an exported folder always
behaves as the run did.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from podium.errors import CheckpointError, InputError, ParityError, PodiumError
from podium.model.forward import head_weight
from podium.model.hub import hub_is_reachable
from podium.model.load import Policy, load_policy
from podium.run.checkpoint import find_damage, list_checkpoints, read_tensors, step_of
from podium.run.folder import Ledger, RunFolder
from podium.settings.sections import Model
from podium.settings.tables import Settings, read_run_settings

PROBE_TOKENS = 64
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest allowed difference of a logprob; merging into bfloat16 weights rounds."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 280, 48, 12, 14, 36

LOADING = {
    "adapter": """```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained(model.peft_config["default"].base_model_name_or_path)
```

or serve it: `podium serve THIS_FOLDER --token-file token`.""",
    "model": """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```

or serve it: `vllm serve THIS_FOLDER`.""",
}


@dataclass(frozen=True)
class Trained:
    """What a command's target (a run, an adapter or a model) stands for."""

    model: dict[str, Any]
    """The `[model]` table, or only its `name` if no more is known."""
    weights: Path | None
    """A model folder or an adapter folder; None: the model itself."""
    run: RunFolder | None
    """The run that trained it, if the target is a run."""


def find_trained(target: str) -> Trained:
    """`target` is a run folder, an adapter folder, a model folder or a model's name."""
    path = Path(target).expanduser()
    if (path / "settings.toml").is_file():
        run = RunFolder.open(path)
        if not run.final.is_dir():
            raise InputError(f"{path} has no trained model yet: {run.final} is written when the run finishes")
        return Trained(_run_model(run), run.final, run)
    adapter = path / "adapter_config.json"
    if not adapter.is_file():
        return Trained({"name": target}, None, None)
    try:
        base = json.loads(adapter.read_text())["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        base = None
    if not isinstance(base, str):
        raise InputError(f"{adapter} does not name its base model (base_model_name_or_path)")
    return Trained({"name": base}, path, None)


def _run_model(run: RunFolder) -> dict[str, Any]:
    """The `[model]` table that a run was trained with."""
    return read_run_settings(run.settings).get("model", {})


@dataclass(frozen=True)
class Exported:
    """What was written."""

    kind: str
    """"adapter" or "model"."""
    files: dict[str, int]
    """File name → bytes."""
    gap: float | None
    """Largest difference of a probe's logprobs from base + adapter; None if nothing was merged."""


def export(target: str, out: Path, *, merge: bool = False, step: int | None = None) -> Exported:
    """`target` is a run or an adapter folder; `step` selects one of the run's checkpoints instead of its end."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} exists already; give a new folder")
    trained = _find(target, step)
    section = Settings.from_dict({"model": trained.model}).model.model_copy(update={"device": "cpu"})
    policy = load_policy(section, seed=0, weights=trained.weights)
    if merge and policy.peft is None:
        raise InputError(f"--merge has no effect: {target} trained every weight, so there is no adapter; leave it out")
    if step is not None and trained.run is not None:
        policy.load_trained(read_tensors(_checkpoint(trained.run, step)))
    unfinished = out.with_name(f"{out.name}.tmp-{os.getpid()}")
    try:
        gap = _write(policy, section, unfinished, merge)
        kind = "adapter" if policy.peft is not None and not merge else "model"
        _write_card(unfinished, trained, section.name, kind, step)
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{out} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(kind, {path.name: path.stat().st_size for path in sorted(out.iterdir())}, gap)


def _find(target: str, step: int | None) -> Trained:
    path = Path(target).expanduser()
    if step is not None:
        run = RunFolder.open(path)
        return Trained(_run_model(run), None, run)
    trained = find_trained(target)
    if trained.weights is None:
        raise InputError(f"{target} is neither a run folder nor an adapter folder: nothing was trained there")
    return trained


def _checkpoint(run: RunFolder, step: int) -> Path:
    place = run.checkpoints / f"step-{step:06d}"
    if not place.is_dir():
        there = ", ".join(str(step_of(each)) for each in list_checkpoints(run.checkpoints))
        raise InputError(f"no checkpoint of step {step}; there are: {there or 'none'}")
    if complaint := find_damage(place):
        raise CheckpointError(f"{place} is damaged: {complaint}")
    return place


def _write(policy: Policy, section: Model, folder: Path, merge: bool) -> float | None:
    """Writes the weights and their config; returns how far merged weights differ from base + adapter."""
    if policy.peft is not None and not merge:
        policy.peft.save_pretrained(str(folder))
        return None
    rows = head_weight(policy.model).shape[0]
    probe = torch.tensor([[(7 * i * i + 3 * i + 1) % rows for i in range(PROBE_TOKENS)]])  # from the whole vocabulary
    expected = _logprobs(policy.model, probe)
    model = policy.model if policy.peft is None else policy.peft.merge_and_unload(safe_merge=True)
    model.save_pretrained(str(folder))
    policy.tokenizer.save_pretrained(str(folder))
    written = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=model.dtype, trust_remote_code=section.trust_remote_code, use_safetensors=True
    )
    gap = float((_logprobs(written, probe) - expected).abs().max())
    if not gap <= TOLERANCE[model.dtype]:
        raise ParityError(f"the written weights give logprobs that differ by {gap:.3g} from those of the trained model")
    return gap if merge else None


@torch.no_grad()
def _logprobs(model: PreTrainedModel | Any, ids: torch.Tensor) -> torch.Tensor:
    """Logprobs of the whole vocabulary at every position, by the model's own forward pass, as users compute it."""
    return torch.log_softmax(model.eval()(input_ids=ids).logits.float(), dim=-1)


class PushError(PodiumError):
    """The hub rejected the upload."""


def push(target: str, name: str, *, merge: bool, step: int | None, private: bool, dry_run: bool) -> Iterator[str]:
    """Yields lines for people. Checks that an upload is possible before exporting anything."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise InputError(f"{name!r} is not a valid repository name: {error}") from None
    if not dry_run and get_token() is None:
        raise InputError("no token for the model hub: run `hf auth login` or set HF_TOKEN; --dry-run needs none")
    if not dry_run and not hub_is_reachable():
        raise InputError("the model hub cannot be reached from here; `podium export` writes the same folder to disk")
    with tempfile.TemporaryDirectory(prefix="podium-push-") as scratch:
        folder = Path(scratch) / "model"
        made = export(target, folder, merge=merge, step=step)
        for file, size in made.files.items():
            yield f"{size:>14,}  {file}"
        if dry_run:
            yield f"nothing was sent; without --dry-run, these {len(made.files)} files go to {name}"
            return
        api = HfApi()
        try:
            url = api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=f"Trained by Podium: {made.kind}")
        except (HfHubHTTPError, HTTPError, OSError) as error:
            raise PushError(f"the hub rejected {name}: {str(error).strip().splitlines()[0]}") from None
        yield f"pushed to {url}"


def _write_card(folder: Path, trained: Trained, base: str, kind: str, step: int | None) -> None:
    """README.md: what the model is, where it comes from, its results and how to load it; and curve.svg.

    Without a run, the card has no results and no settings.
    """
    run = trained.run
    name = run.path.resolve().name if run else "adapter"
    form = "A LoRA adapter over" if kind == "adapter" else "Plain weights, trained from"
    what = f"{form} `{base}`" + ("." if step is None else f", as it was after step {step}.")
    title = f"# {name}: {base.rstrip('/').rpartition('/')[2]} trained by reinforcement learning"
    parts = [_front_matter(base, kind), title, what]
    if run is not None:
        tables = read_run_settings(run.settings)
        history = [line for line in Ledger(run).history() if step is None or line["step"] <= step]
        drawn = _curve(history)
        if drawn is not None:
            (folder / "curve.svg").write_text(drawn, encoding="utf-8")
        parts = [*parts[:-1], f"{what} {_origin(tables)}", *_results(history, drawn is not None), _settings(tables)]
    card = "\n\n".join([*parts, "## Load it", LOADING[kind]])
    (folder / "README.md").write_text(f"{card}\n", encoding="utf-8")


def _front_matter(base: str, kind: str) -> str:
    """The metadata that the model hub reads."""
    library = "peft" if kind == "adapter" else "transformers"
    lines = [f"library_name: {library}", "pipeline_tag: text-generation", "tags: [podium, reinforcement-learning]"]
    if base.count("/") == 1 and not base.startswith((".", "/", "~")):  # a hub name
        lines.insert(0, f"base_model: {base}")
    return "\n".join(["---", *lines, "---"])


def _origin(tables: dict[str, Any]) -> str:
    rewards = ", ".join(f"`{table['name']}`" for table in tables.get("reward", [])) or "those that its rows name"
    data = ", ".join(f"`{table.get('path', table['name'])}`" for table in tables.get("data", []))
    return f"Data: {data}. Rewards: {rewards}. Loss: `{tables.get('loss', {}).get('name', 'grpo')}`."


def _results(history: list[dict[str, Any]], has_curve: bool) -> list[str]:
    """Accuracy before and after, and the curve."""
    evals = [line for line in history if line.get("eval") and "eval/accuracy" in line]
    if not evals:
        return []
    rows = [f"| {line['step']} | {line['eval/accuracy']:.3f} | {_interval(line)} |" for line in evals]
    table = "\n".join(["| step | held-out accuracy | 95 % interval |", "|---|---|---|", *rows])
    first, last, prompts = evals[0]["eval/accuracy"], evals[-1]["eval/accuracy"], int(evals[-1]["eval/prompts"])
    said = f"Held-out accuracy on {prompts} prompts: {first:.3f} before, {last:.3f} after."
    return ["## Results", said, table, *(["![accuracy by step](curve.svg)"] if has_curve else [])]


def _interval(line: dict[str, Any]) -> str:
    low, high = line.get("eval/accuracy_low"), line.get("eval/accuracy_high")
    return f"{low:.3f} to {high:.3f}" if low is not None and high is not None else ""


def _settings(tables: dict[str, Any]) -> str:
    """The settings in full, without the run's folder."""
    own = {key: value for key, value in tables.get("run", {}).items() if key != "folder"}
    shown = tomli_w.dumps({**tables, "run": own}).strip()
    return f"## Settings\n\n<details><summary>settings.toml</summary>\n\n```toml\n{shown}\n```\n\n</details>"


def _curve(lines: list[dict[str, Any]]) -> str | None:
    """An SVG chart of accuracy by step: held-out, with its interval, and in training; None if unknown."""
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

    def grid(height: float) -> str:
        return f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}" stroke="#ddd"/>'

    def line_through(places: list[tuple[float, float]], colour: str) -> str:
        path = " ".join(f"{x(step)},{y(value)}" for step, value in places)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'

    marks = [_text(LEFT - 6, y(v) + 4, f"{v:g}", "end") + grid(y(v)) for v in (0, 0.25, 0.5, 0.75, 1)]
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
