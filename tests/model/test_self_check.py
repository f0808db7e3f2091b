"""Architectures that Podium would compute wrongly are refused when they are loaded, and the others are not."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    PhiConfig,
    Qwen2Config,
    StableLmConfig,
)

from podium.engine import inprocess
from podium.engine.inprocess import Inprocess, SlotBatch
from podium.errors import InputError
from podium.model import attention, self_check
from podium.model.forward import max_context_tokens
from podium.model.load import Policy, twin_of
from podium.model.self_check import check_model, moved_products, own_logprobs, small_copy, texts, tolerance, windows_of
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
    with pytest.raises(InputError, match=r"model\.name = .* (is not computed correctly|cannot run)"):
        check_model(built(WRONG[name]), name)


WINDOW = 4096
"""Far beyond what the check could compute with the model itself."""


def with_window():
    return built(MistralConfig(**TINY, sliding_window=WINDOW))


def policy_of(model, small) -> Policy:
    return Policy(model, twin_of(model), None, None, (), 64, torch.device("cpu"), "", small=small)


def test_a_window_that_is_not_kept_is_seen_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    check_model(with_window(), "mistral")
    monkeypatch.setattr(attention, "window_of", lambda module, kwargs: None)
    with pytest.raises(InputError, match=r"MistralForCausalLM\) is not computed correctly .* beyond a few tokens"):
        check_model(with_window(), "mistral")


def test_a_window_that_is_one_too_wide_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.window_of
    monkeypatch.setattr(attention, "window_of", lambda *given: right(*given) + 1)
    with pytest.raises(InputError, match="beyond a few tokens"):
        check_model(with_window(), "mistral")


def test_documents_that_differ_in_length_are_packed_for_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rows with several tables go wrong here: two documents of about one length have one."""
    right = attention._by_table

    def first_table_for_all(q, k, v, segments, *others):
        made = right(q, k, v, segments, *others)
        return made if len(segments.tables) < 2 else made.roll(1, 0)

    monkeypatch.setattr(attention, "_by_table", first_table_for_all)
    with pytest.raises(InputError, match="is not computed correctly"):
        check_model(built(RIGHT["qwen2"]), "qwen2")


def test_what_a_pass_draws_at_random_is_seen() -> None:
    model = built(RIGHT["qwen2"])
    layer = model.get_decoder().layers[0].mlp
    layer.register_forward_hook(lambda module, args, out: out + 0.3 * module.training * torch.randn_like(out))
    with pytest.raises(InputError, match="is not computed correctly"):
        check_model(model, "qwen2")


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gpt2"])
def test_in_bfloat16_right_models_pass(name: str) -> None:
    check_model(built(RIGHT[name]).to(torch.bfloat16), name)


def test_in_bfloat16_logits_that_are_five_percent_off_are_seen() -> None:
    """On a few tokens that is less than 0.3, which was allowed once; it is 0.8 elsewhere."""
    with pytest.raises(InputError, match="is not computed correctly"):
        check_model(built(GraniteConfig(**PLAIN, logits_scaling=1.05)).to(torch.bfloat16), "granite")


def test_the_tolerance_follows_the_precision_and_hooks_leave_no_trace() -> None:
    model = built(RIGHT["gpt2"])  # whose layers are no torch.nn.Linear
    [ids] = texts(model, [12])
    before = own_logprobs(model, ids)
    with moved_products(model, 2.0**-7):
        assert own_logprobs(model, ids) != before
    assert own_logprobs(model, ids) == before
    assert tolerance(model, torch.float32) == 1e-4
    assert 0.01 < tolerance(model, torch.bfloat16) < 0.3


def test_the_small_copy_has_every_kind_of_layer_and_draws_no_random_numbers() -> None:
    kinds = ["full_attention"] * 6 + ["sliding_attention"] * 2
    config = Qwen2Config(**{**PLAIN, "num_hidden_layers": 8}, use_sliding_window=True, sliding_window=WINDOW)
    config.layer_types = kinds
    model = built(config)
    state = torch.random.get_rng_state()
    small, reason = small_copy(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert small is not None
    assert reason == ""
    assert small.config.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    assert windows_of(small.config) == {"sliding_window": 8}
    assert model.config.sliding_window == WINDOW


def test_without_a_small_copy_long_windows_are_refused_and_short_ones_are_tried_on_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(self_check, "small_copy", lambda model: (None, "sizes do not fit"))
    with pytest.raises(InputError, match=r"cannot be checked: .* sliding_window = 4096, .* \(sizes do not fit\)"):
        check_model(with_window(), "mistral")
    assert check_model(built(RIGHT["mistral"]), "mistral") is None
    monkeypatch.setattr(attention, "window_of", lambda module, kwargs: None)
    with pytest.raises(InputError, match="is not computed correctly"):
        check_model(built(RIGHT["mistral"]), "mistral")


def test_an_engine_that_does_not_keep_a_long_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_window()
    small = check_model(model, "mistral")
    Inprocess(policy_of(model, small))
    monkeypatch.setattr(attention, "_within_window", lambda mask, query, key, window: mask)
    with pytest.raises(InputError, match=r"engine.name = 'inprocess' cannot decode this architecture: logprobs differ"):
        Inprocess(policy_of(model, small))


def test_an_engine_that_fails_while_it_decodes_says_so_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(RIGHT["qwen2"])

    def fail(self: SlotBatch) -> None:
        raise AttributeError("'Cache' object has no attribute 'conv_states'")

    monkeypatch.setattr(SlotBatch, "next_cache", fail)
    with pytest.raises(InputError, match=r"cannot decode this architecture \(AttributeError: 'Cache' .*; use another"):
        Inprocess(policy_of(model, None))


def test_captured_decoding_is_tried_on_the_small_copy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from podium.engine.cuda import decode_step
    from podium.records import Request, Sampling

    model = with_window()
    engine = Inprocess(policy_of(model, check_model(model, "mistral")))
    asked = [Request((1, 2, 3), Sampling(max_new_tokens=4), 1)]
    engine._captured = inprocess.CapturedDecoder(engine._model, 8, None, lambda: 0)
    engine._compare(asked)
    assert engine._captured is not None
    monkeypatch.setattr(decode_step, "window_of", lambda module, kwargs: None)
    with pytest.warns(UserWarning, match="without CUDA graphs.*cannot decode"):
        engine._compare(asked)
    assert engine._captured is None


def test_the_context_ends_where_rotary_frequencies_change() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    assert max_context_tokens(LlamaConfig(**TINY, rope_parameters=rope)) == 32
    assert max_context_tokens(LlamaConfig(**TINY)) == 64
    by_layer_type = Gemma3TextConfig(**TINY)
    by_layer_type.rope_parameters = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert max_context_tokens(by_layer_type) == 32
    assert max_context_tokens(Gemma3Config(text_config=Gemma3TextConfig(**TINY).to_dict())) == 64
