"""Each push on a GPU, with the adapter in bfloat16 beside its layers: every fault is seen, and a good run goes on."""

import asyncio
from pathlib import Path

import pytest
import torch

from podium.engine.inprocess import Inprocess
from podium.errors import ParityError
from podium.model.load import load_policy
from podium.settings.sections import Model
from podium.sync import Delivery, Noise
from podium.sync.shared import Shared
from tests.sync.test_faults import PROBE, Moving, pushes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def a_pair(tmp_path: Path, **others) -> tuple[Moving, Inprocess, Shared]:
    """With `model.dtype = "auto"`: an adapter over a base in bfloat16."""
    policy = load_policy(Model.model_validate({"device": "cuda", **others}), seed=0)
    trainer = Moving(policy, "bfloat16", torch.device("cuda"))
    engine = Inprocess(policy, True, torch.bfloat16)
    delivery = Delivery(trainer, engine, policy, PROBE, Noise("bfloat16"), tmp_path)  # type: ignore[arg-type]
    return trainer, engine, Shared(delivery)


@pytest.mark.parametrize("fault", ["never", "old", "half scale", "half of the layers"])
@pytest.mark.parametrize("lr", [1e-5, 1e-7])
def test_a_fault_is_seen(fault: str, lr: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, engine, channel = a_pair(tmp_path)
    right, last = engine._apply_adapter, {}

    def wrong(layer: str, a: torch.Tensor, b: torch.Tensor) -> None:
        before, last[layer] = last.get(layer), (a.clone(), b.clone())
        if fault == "old":
            right(layer, *(before or (a, b)))
        elif fault == "half scale":
            right(layer, a, b / 2)
        elif fault == "half of the layers" and ".0." in layer:
            right(layer, a, b)

    monkeypatch.setattr(engine, "_apply_adapter", wrong)
    with pytest.raises(ParityError, match="does not sample from the trained weights"):
        pushes(trainer, engine, channel, 3, lr)


@pytest.mark.parametrize("model", [{}, {"dtype": "float32"}, {"lora": False}])
def test_a_good_run_of_500_pushes_is_never_ended(model: dict, tmp_path: Path) -> None:
    trainer, engine, channel = a_pair(tmp_path, **model)
    pushes(trainer, engine, channel, 500, 1e-4)
    assert asyncio.run(engine.held()).faults == ()
