"""A packed row gives each document what it would get alone, for the shapes of several model families."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config

from podium.model import attention
from podium.model.attention import Segments
from podium.model.forward import place, policy_logprobs, sequence_logprobs
from podium.pack import Document, to_batch
from podium.records import Batch, Prompt, Rollout

TINY = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {
    "llama": LlamaConfig(**TINY),
    "qwen3": Qwen3Config(**TINY),
    "gemma3": Gemma3TextConfig(
        **TINY, query_pre_attn_scalar=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
    ),
}


def a_model(shape: str):
    torch.manual_seed(1)
    config = copy.deepcopy(SHAPES[shape])  # from_config writes the attention's name into what it is given
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).eval()


def a_document(prompt: int, answer: int, start: int) -> Document:
    ids = [(start * 7 + 3 * i) % 47 + 3 for i in range(prompt + answer)]
    rollout = Rollout(tuple(ids[prompt:]), (0.0,) * answer, (1,) * answer, "stop", "", 0, 0, 0, 0, "")
    return Document(Prompt(0, tuple(ids[:prompt])), rollout, 1.0)


DOCUMENTS = [a_document(3, 4, 0), a_document(9, 12, 1), a_document(1, 1, 2), a_document(6, 2, 3)]


def a_batch(documents) -> Batch:
    tokens = sum(len(document.rollout.token_ids) for document in documents)
    return to_batch(documents, num_loss_tokens=tokens, num_rollouts=len(documents), temperature=1.0)


def logprobs_of(model, documents, *, shared_prefix: bool = False) -> torch.Tensor:
    return policy_logprobs(model, place(a_batch(documents), torch.device("cpu"), shared_prefix=shared_prefix))[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_logprobs_equal_unpacked_ones(shape: str) -> None:
    model = a_model(shape)
    packed = logprobs_of(model, DOCUMENTS)
    alone = torch.cat([logprobs_of(model, [document]) for document in DOCUMENTS])
    assert torch.allclose(packed, alone, atol=1e-5)
    assert packed.abs().sum() > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_logprobs_equal_those_of_plain_transformers(shape: str) -> None:
    """The oracle is the same weights under transformers' own eager attention, one document at a time."""
    model = a_model(shape)
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[shape]), attn_implementation="eager").eval()
    plain.load_state_dict(model.state_dict())
    assert (model.config._attn_implementation, plain.config._attn_implementation) == (attention.NAME, "eager")
    for document in DOCUMENTS:
        ids = [*document.prompt.token_ids, *document.rollout.token_ids]
        with torch.no_grad():
            every = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [float(every[t - 1, ids[t]]) for t in range(1, len(ids))]
        assert sequence_logprobs(model, ids) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_do_not_depend_on_packing(shape: str) -> None:
    model = a_model(shape)
    logprobs_of(model, DOCUMENTS).sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for document in DOCUMENTS:
        logprobs_of(model, [document]).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(packed[name], parameter.grad, atol=1e-4), name


@pytest.mark.parametrize("value_dim", [8, 12])
def test_a_decode_step_reads_each_key_once_for_the_queries_that_share_it(value_dim: int) -> None:
    """Also where values are not as wide as keys."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 6, 1, 8), torch.randn(3, 2, 5, 8), torch.randn(3, 2, 5, value_dim)
    mask = (torch.arange(5) <= torch.tensor([[4], [2], [0]]))[:, None, None, :]
    found, weights = attention.packed_attention(None, query, key, value, mask, scaling=0.3)
    scores = (query @ key.repeat_interleave(3, 1).transpose(2, 3) * 0.3).masked_fill(~mask, -torch.inf)
    expected = scores.softmax(-1) @ value.repeat_interleave(3, 1)
    assert weights is None
    assert torch.allclose(found, expected.transpose(1, 2), atol=1e-6)


def test_values_narrower_than_keys_come_out_of_several_tables_as_of_one() -> None:
    """Documents of 2 and of 9 tokens stand in two tables."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 11, 12), torch.randn(1, 2, 11, 12), torch.randn(1, 2, 11, 8)
    lengths = np.array([2, 9])
    packed, _ = attention.packed_attention(
        None, query, key, value, None, segments=Segments.of(lengths, lengths, None), scaling=0.3
    )
    parts = []
    for part in (slice(0, 2), slice(2, 11)):
        alone = np.array([part.stop - part.start])
        given = (tensor[:, :, part] for tensor in (query, key, value))
        parts.append(
            attention.packed_attention(None, *given, None, segments=Segments.of(alone, alone, None), scaling=0.3)[0]
        )
    assert packed.shape == (1, 11, 4, 8)
    assert torch.allclose(packed, torch.cat(parts, 1), atol=1e-6)


@pytest.mark.parametrize(
    ("given", "types", "window"),
    [
        ({"sliding_window": 7}, None, 7),
        ({"sliding_window": None}, None, None),  # the architecture's word
        ({}, None, 5),
        ({}, ["full_attention", "sliding_attention"], 5),
        ({}, ["sliding_attention", "full_attention"], None),
    ],
)
def test_a_window_that_is_not_handed_over_is_the_configs(given: dict, types: list[str] | None, window: int) -> None:
    layer = SimpleNamespace(config=SimpleNamespace(sliding_window=5, layer_types=types), layer_idx=1)
    assert attention.window_of(layer, given) == window
