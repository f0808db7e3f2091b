"""What only a GPU can show: the variable-length kernel, bfloat16 products, and the demo on CUDA."""

import json
from pathlib import Path

import pytest
import torch

from podium.cli import main
from podium.model.forward import place, policy_logprobs
from podium.records import Batch
from podium.trainer import check_optimizer
from tests.conftest import small_tables
from tests.model.test_attention import DOCUMENTS, SHAPES, a_batch, a_model
from tests.trainer.test_optimizer import assert_it_goes_on_bit_for_bit, needs_bitsandbytes

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # the compiler warns of its own parts
]


def gradients(
    model, batch: Batch, dtype: torch.dtype | None, shared_prefix: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logprobs = policy_logprobs(model, place(batch, torch.device("cuda"), shared_prefix=shared_prefix), dtype)[0]
    logprobs.sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten().float() for p in model.parameters()])


@pytest.mark.parametrize("shape", SHAPES)
def test_the_variable_length_kernel_gives_what_padding_gives(shape: str) -> None:
    """Head size 8, grouped queries, a window shorter than the documents; bfloat16 against float32."""
    model = a_model(shape).cuda()
    batch = a_batch(DOCUMENTS)
    exact, exact_gradient = gradients(model, batch, None)
    half, half_gradient = gradients(model, batch, torch.bfloat16)
    assert float((half - exact).abs().max()) < 0.1
    assert float((half_gradient - exact_gradient).norm() / exact_gradient.norm()) < 0.05


@pytest.mark.parametrize(
    "changes", [{}, {"model": {"lora": False}}, {"trainer": {"precision": "bfloat16", "lr": 5e-4}}]
)
def test_a_run_on_cuda_is_the_run_that_was_meant(changes: dict, tmp_path: Path) -> None:
    import tomli_w

    tables = small_tables(tmp_path / "run")
    for section, values in changes.items():
        tables[section] = {**tables[section], **values}
    tables["model"]["device"] = "cuda"
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    assert main(["train", str(tmp_path / "run.toml")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    limit = 0.05 if "trainer" in changes else 1e-4
    assert all(line["mismatch/abs_mean"] < limit for line in lines)
    assert main(["resume", str(tmp_path / "run"), "--run.steps=5"]) == 0


@needs_bitsandbytes
def test_the_8_bit_optimizer_runs_on_cuda_and_goes_on_bit_for_bit() -> None:
    check_optimizer("adamw_8bit", torch.device("cuda"))
    assert_it_goes_on_bit_for_bit("adamw_8bit", "cuda")
