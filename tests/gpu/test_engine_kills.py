"""G20: a vLLM engine on a GPU, killed again and again while it writes."""

import importlib.util
import time
from pathlib import Path

import pytest
import torch

from tests.engine.chaos import a_run
from tests.engine.test_pool_faults import check_recovery, rollouts_once

KILLS = 10
MEMORY_SHARE = 0.2
MEMORY_S = 30.0
"""Within which the memory of a killed engine must be free again."""

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm)"),
]


def used_memory() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.timeout(1800)
def test_g20_ten_kills_of_a_vllm_engine_in_mid_rollout(tmp_path: Path) -> None:
    total = torch.cuda.mem_get_info()[1]
    waits: list[float] = []

    def wait_for_memory() -> None:
        """Most of the engine's share is free before the next one, which starts at once, takes it."""
        began = time.monotonic()
        while used_memory() > before - 0.8 * MEMORY_SHARE * total:
            assert time.monotonic() - began < MEMORY_S, "the memory of a killed engine is still taken"
            time.sleep(0.01)
        waits.append(time.monotonic() - began)

    member = ("--engine.member.eager=true", f"--engine.member.memory_share={MEMORY_SHARE}")
    plain = ("--model.device=cuda",)
    flags = (*plain, "--engine.of=vllm_local", "--engine.replicas=[1, 1]", *member)
    with a_run(tmp_path, *flags) as run:
        run.until(lambda: run.num_steps() > 0, 600)
        for number in range(KILLS):
            before, began = used_memory(), time.monotonic()
            run.kill_in_mid_rollout(wait_for_memory, limit_s=300)
            print(f"kill {number + 1}: back in rollouts after {time.monotonic() - began:.0f} s", flush=True)
        assert run.stop() == 143
        assert run.left_behind() == []
    assert len(run.events("redispatched")) >= KILLS
    assert len(waits) >= KILLS
    check_recovery(run, limit_s=300)
    rollouts_once(run)
    print(f"memory was free again after {max(waits):.1f} s at the latest")
