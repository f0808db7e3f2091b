"""From a page's data to one self-contained HTML file.

Style and script are inlined. The page's content policy forbids it to load anything and allows only the script with the
given hash. The data is one JSON object, so no text of a rollout ever becomes markup.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

PARTS = Path(__file__).with_name("static")
SCRIPTS = ("base.js", "charts.js", "sections.js", "rollouts.js", "runs.js", "main.js")


def to_json(data: Mapping[str, Any]) -> str:
    """ASCII JSON without a `<`, so that no text can close the script element that holds it."""
    try:
        text = json.dumps(data, default=str, separators=(",", ":"), allow_nan=False)
    except ValueError:  # NaN or an infinity, which browsers cannot parse
        text = json.dumps(_finite(data), default=str, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    """Replaces NaN and infinities by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, (list, tuple)) else value


def render(data: Mapping[str, Any]) -> str:
    before, after = _template()
    return before + to_json(data) + after


@lru_cache
def _template() -> tuple[str, str]:
    """The page before its data, and after it."""
    script = "\n" + "\n".join(_part(name) for name in SCRIPTS) + "\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _part("page.html").replace("{{SCRIPT_HASH}}", f"sha256-{digest}").replace("{{STYLE}}", _part("style.css"))
    before, after = page.replace("\n{{SCRIPT}}\n", script).split("{{DATA}}")
    return before, after


def _part(name: str) -> str:
    return (PARTS / name).read_text(encoding="utf-8").rstrip("\n")
