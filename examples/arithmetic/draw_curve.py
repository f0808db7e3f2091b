"""Draws a run's accuracy as an SVG picture: `python examples/arithmetic/draw_curve.py RUN OUT.svg`."""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 50, 40, 16


def main(run: Path, out: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    sampled = [(line["step"], line["reward/correct_rate"]) for line in lines if "reward/correct_rate" in line]
    held_out = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    last = max(step for step, _ in sampled)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + step / last * (WIDTH - LEFT - 12)
        return round(x, 1), round(HEIGHT - BOTTOM - value * (HEIGHT - BOTTOM - TOP), 1)

    def polyline(points: list[tuple[int, float]], colour: str) -> str:
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'

    def text(x: float, y: float, words: str, anchor: str = "middle", colour: str = "#555") -> str:
        return f'<text x="{x}" y="{y}" font-size="13" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    marks = []
    for value in (0, 0.25, 0.5, 0.75, 1):
        _, y = place(0, value)
        marks.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        marks.append(text(LEFT - 8, y + 4, f"{value:g}", "end"))
    marks += [
        text(place(step, 0)[0], HEIGHT - BOTTOM + 18, str(step)) for step in range(0, last + 1, max(1, last // 4))
    ]
    dots = [f'<circle cx="{x}" cy="{y}" r="4" fill="#c2570c"/>' for x, y in (place(*point) for point in held_out)]
    body = [
        '<rect width="100%" height="100%" fill="white"/>',
        *marks,
        polyline(sampled, "#1f5fd1"),
        polyline(held_out, "#c2570c"),
        *dots,
        text(WIDTH - 20, HEIGHT - 92, "held out, greedy", "end", "#c2570c"),
        text(WIDTH - 20, HEIGHT - 72, "sampled while training", "end", "#1f5fd1"),
        text(WIDTH / 2, HEIGHT - 4, "step"),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    out.write_text(head + "".join(body) + "</svg>\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
