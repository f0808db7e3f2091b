import json
import os
import subprocess
import sys

import pytest

from tests.kernels import KERNELS


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Of each kernel "right" or a traceback, by a process of its own: Triton reads the variable when it is loaded."""
    pytest.importorskip("triton", reason="no Triton on this system")
    command = [sys.executable, "-m", "tests.kernels"]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert results, done.stderr[-2000:]
    return {name: text for result in results for name, text in result.items()}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_what_the_plain_code_computes(name: str, found: dict[str, str]) -> None:
    assert found[name] == "right"
