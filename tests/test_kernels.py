import os
import subprocess
import sys

import pytest

from tests.kernels import KERNELS


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_what_the_plain_code_computes(name: str) -> None:
    pytest.importorskip("triton", reason="no Triton on this system")
    command = [sys.executable, "-m", "tests.kernels", name]  # a process: Triton looks at the variable when it is loaded
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
