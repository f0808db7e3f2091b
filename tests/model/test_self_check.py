"""Architectures that Podium would compute wrongly are refused when they are loaded, and the others are not."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    GPT2Config,
    GraniteConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    StableLmConfig,
)

from podium.errors import InputError
from podium.model import attention
from podium.model.self_check import check_model
from tests.model.test_attention import SHAPES, TINY, a_model

PLAIN = {key: value for key, value in TINY.items() if key != "head_dim"}
RIGHT = {
    "qwen2": Qwen2Config(**PLAIN),
    "mistral": MistralConfig(**TINY, sliding_window=4),
    "gpt2": GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}
WRONG = {
    "granite, which scales its logits": GraniteConfig(**PLAIN, logits_scaling=4.0),
    "cohere, which scales its logits": CohereConfig(**PLAIN, logit_scale=0.1),
    "phi, whose head has a bias": PhiConfig(**PLAIN),
    "stablelm, which drops what attention is handed": StableLmConfig(**PLAIN),
}


def built(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # small initial weights would hide a wrong scale; a bias starts at 0
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("shape", SHAPES)
def test_the_shapes_of_the_attention_tests_pass(shape: str) -> None:
    check_model(a_model(shape), shape)


@pytest.mark.parametrize("name", RIGHT)
def test_architectures_that_are_computed_rightly_pass_and_keep_their_attention(name: str) -> None:
    model = built(RIGHT[name])
    check_model(model, name)
    assert model.config._attn_implementation == attention.NAME


@pytest.mark.parametrize("name", WRONG)
def test_architectures_that_would_train_wrongly_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=r"model\.name = .* (is not computed rightly|cannot run)"):
        check_model(built(WRONG[name]), name)
