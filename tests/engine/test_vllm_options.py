"""Options of vllm_local that a machine or a schedule cannot honour, refused before vLLM is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from podium.engine.vllm_local import VllmLocal, _check_device
from podium.errors import InputError
from podium.model.load import load_policy
from podium.settings.sections import Model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sleep": True}, "engine.sleep has no effect on a CPU"),
        ({"tensor_parallel": 2}, "engine.tensor_parallel = 2, but a CPU is one device; give at most 1"),
        ({"memory_share": 0.5}, "engine.memory_share has no effect on a CPU"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused(options: dict[str, Any], message: str) -> None:
    policy = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    with pytest.raises(InputError, match=message):
        VllmLocal(policy, **options)


def test_what_a_gpu_or_a_schedule_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    policy: Any = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    _check_device(policy, snapshot=False, memory_share=0.5, tensor_parallel=2, sleep=True)
    with pytest.raises(InputError, match="2 GPUs are here; give at most 2"):
        _check_device(policy, snapshot=False, memory_share=None, tensor_parallel=4, sleep=False)
    with pytest.raises(InputError, match=r"engine.sleep needs run.sync_every = 1"):
        _check_device(policy, snapshot=True, memory_share=None, tensor_parallel=1, sleep=True)
