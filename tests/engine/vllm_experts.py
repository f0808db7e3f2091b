"""In a process of its own: a mixture of experts in a real vLLM, with other weights than its files hold."""

import asyncio

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from podium.engine.vllm_local import VllmLocal
from podium.errors import InputError
from podium.model.evidence import mean_gap
from podium.model.forward import sequence_logprobs
from podium.model.load import EMBEDDED, load_policy
from podium.settings.sections import Model

SIZES = {
    "vocab_size": 104,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def main(kind: str, folder: str) -> None:
    """Prints why LoRA is refused, and how far vLLM's logprobs are from the trainer's."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    table = {"device": "cpu", "name": folder}
    try:
        VllmLocal(load_policy(Model.model_validate({**table, "lora": {"targets": ["q_proj"]}}), seed=0))
    except InputError as error:
        print(error)
    policy = load_policy(Model.model_validate({**table, "lora": False}), seed=0)
    engine = VllmLocal(policy, eager=True, max_context_tokens=96)
    with torch.no_grad():
        for _, parameter in policy.named_weights():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    ids = list(range(3, 40))
    asyncio.run(engine.load_weights(policy.named_weights(), 0))
    print("GAP", mean_gap(asyncio.run(engine.score(ids)), sequence_logprobs(policy.model, ids)))
