"""The README's table and pictures of speed on a GPU, from what `end_to_end.py` and `time_to_accuracy.py` measured.

python benchmarks/picture.py            # writes them
python benchmarks/picture.py --check    # exit 1 if they are not what the results say
"""

import argparse
import json
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from _end_to_end_gpu import TRL_AS_DOCUMENTED, on_one_machine

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, PICTURES = ROOT / "README.md", ROOT / "docs" / "images"
BEGIN, END = "<!-- made by benchmarks/picture.py -->", "<!-- end -->"
TITLES = {
    "podium": "Podium",
    "podium-overlap": "Podium, overlapped",
    "podium-mlp": "Podium, exact MLP",
    "podium-vllm": "Podium, vLLM",
}
COLOURS = {"generation": "#4477aa", "training": "#ddaa33", "other": "#bbbbbb"}
CURVES = {"podium": "#4477aa", "podium-overlap": "#aa3377", "trl-128": "#ddaa33"}
WIDTH, LEFT, ROW, BAR = 760, 230, 30, 18

Model = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    models = json.loads((RESULTS / "end_to_end_h200.json").read_text(encoding="utf-8"))["models"]
    learnt = json.loads((RESULTS / "time_to_accuracy_h200.json").read_text(encoding="utf-8"))
    wanted = {
        PAGE: with_table(PAGE.read_text(encoding="utf-8"), table(models)),
        PICTURES / "end_to_end.svg": picture(models),
        PICTURES / "time_to_accuracy.svg": curves(learnt),
    }
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if args.check:
        sys.exit(f"not what the results say: {', '.join(path.name for path in stale)}" if stale else 0)
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")


def with_table(page: str, made: str) -> str:
    """The page with everything between the two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def title(contender: str) -> str:
    if contender == TRL_AS_DOCUMENTED:
        return "TRL, vLLM colocated, as documented"
    if contender.startswith("trl-"):
        return f"TRL, vLLM colocated, {contender.removeprefix('trl-')} at a time"
    return TITLES[contender]


def ran(model: Model) -> dict[str, Any]:
    """Contenders that came to their end, fastest first."""
    whole = {name: facts for name, facts in model["contenders"].items() if "failed" not in facts}
    return dict(sorted(whole.items(), key=lambda item: item[1]["seconds_median"]))


def table(models: Mapping[str, Model]) -> str:
    """Markdown; `TRL / this` is against the fastest TRL of the same model on the same machine, that of Podium's row."""
    lines = [
        "| model, rollouts × tokens | | s/step | TRL / this | generated tokens/s | peak GB | logprob mismatch |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, model in models.items():
        work, contenders = model["workload"], ran(model)
        for contender, facts in contenders.items():
            beside = [rival for rival, other in contenders.items() if on_one_machine(facts, other)]
            trl = [contenders[rival]["seconds_median"] for rival in beside if rival.startswith("trl-")]
            is_beside = "podium" in beside or "podium" not in contenders
            ratio = f"{min(trl) / facts['seconds_median']:.1f}" if trl and is_beside else "–"
            lines.append(
                f"| {name}, {work['prompts_per_step'] * 8} × {work['max_new_tokens']} | {title(contender)} "
                f"| {facts['seconds_median']:.2f} | {ratio} | {facts['generated_tokens_per_s']:,.0f} "
                f"| {facts['peak_memory_gb']:.0f} | {facts['mismatch_abs_mean']:.4f} |"
            )
    return "\n".join(lines)


def picture(models: Mapping[str, Model]) -> str:
    """Seconds of a step as bars, one a contender, by what they were spent on; each model has a scale of its own."""
    parts: list[str] = []
    y = 34
    for name, model in models.items():
        contenders = ran(model)
        parts.append(text(10, y, name, "bold"))
        longest = max(facts["seconds_median"] for facts in contenders.values())
        for contender, facts in contenders.items():
            y += ROW
            parts += bar(y, title(contender), facts, (WIDTH - LEFT - 70) / longest)
        y += ROW + 12
    legend = "".join(
        f'<rect x="{LEFT + 130 * i}" y="6" width="10" height="10" fill="{colour}"/>'
        + text(LEFT + 16 + 130 * i, 15, part)
        for i, (part, colour) in enumerate(COLOURS.items())
    )
    return svg(y - 18, "Seconds of a GRPO step on one H200", legend + "".join(parts))


def svg(height: int, label: str, content: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{content}</svg>\n'
    )


def bar(y: int, label: str, facts: Mapping[str, Any], scale: float) -> list[str]:
    """Of generation, what is not hidden behind training."""
    training = facts["training_s_median"]
    generation = min(facts["generation_s_median"], facts["seconds_median"] - training)
    spent = {"generation": generation, "training": training}
    spent["other"] = max(0.0, facts["seconds_median"] - generation - training)
    drawn, x = [text(10, y, label)], float(LEFT)
    for part, seconds in spent.items():
        width = seconds * scale
        drawn.append(f'<rect x="{x:.1f}" y="{y - 13}" width="{width:.1f}" height="{BAR}" fill="{COLOURS[part]}"/>')
        x += width
    return [*drawn, text(x + 6, y, f"{facts['seconds_median']:.2f} s")]


def curves(learnt: Mapping[str, Any]) -> str:
    """Held-out accuracy over training time, and over steps."""
    parts = [
        text(50 + 130 * i, 15, title(name))
        + f'<rect x="{36 + 130 * i}" y="6" width="10" height="10" fill="{CURVES[name]}"/>'
        for i, name in enumerate(learnt)
    ]
    for left, column, label in ((36, 1, "seconds of training"), (410, 0, "steps")):
        parts += panel(
            left, {name: [(row[column], row[3]) for row in each["curve"]] for name, each in learnt.items()}, label
        )
    return svg(250, "Held-out accuracy of SmolLM2-135M on two-digit sums, one H200", "".join(parts))


def panel(left: int, lines: Mapping[str, list[tuple[float, float]]], label: str) -> list[str]:
    """Curves by name in a box of 310 x 190."""
    width, height, top = 310, 190, 28
    most = max(x for points in lines.values() for x, _ in points)
    drawn = []
    for level in (0.0, 0.5, 0.9, 1.0):
        y = top + height * (1 - level)
        drawn.append(f'<line x1="{left}" x2="{left + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        drawn.append(text(left - 28, int(y) + 4, f"{level:.0%}"))
    for name, points in lines.items():
        at = " ".join(f"{left + width * x / most:.1f},{top + height * (1 - y):.1f}" for x, y in points)
        drawn.append(f'<polyline points="{at}" fill="none" stroke="{CURVES[name]}" stroke-width="2"/>')
    return [
        *drawn,
        text(left, top + height + 18, "0"),
        text(left + width - 130, top + height + 18, f"{label}: {most:.0f}"),
    ]


def text(x: float, y: float, content: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="#222222" font-weight="{weight}">{escape(content)}</text>'


if __name__ == "__main__":
    main()
