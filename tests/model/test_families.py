"""Of every family either the engine and the trainer compute what transformers does, or it is refused with a sentence.

A part of the sweep of `tests/families.py`, chosen for what can go wrong: windows by the mask alone, rotary frequencies
that depend on the length, values narrower than keys, routing at random, wrappers, attention code of its own.
"""

import re
from pathlib import Path

import pytest

from podium.errors import InputError
from podium.loss.grpo import grpo
from podium.loss.objective import Objective
from podium.model.load import load_policy
from podium.settings.tables import Settings
from podium.trainer.single import Single
from tests.families import saved, tables_of, verdict
from tests.trainer.test_single import step

RIGHT = [
    *("llama", "qwen3", "gpt2", "olmo3", "gemma3", "gemma4_text", "qwen3_moe"),
    *("qwen2 with a window", "mistral with a window", "qwen2_moe with a window"),
    *("phi3 with longrope", "llama with longrope", "llama with dynamic rope", "llama with yarn rope"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"),
]
REFUSED = {
    "falcon": r"cannot be used: its architecture has its own attention code",
    "gptj": r"cannot be used: its architecture has its own attention code",
    "llama4": r"the decoder of a Llama4ForCausalLM gives no hidden states",
    "phimoe": r"is not computed correctly by Podium's packed forward pass: its logprobs differ",
    "phimoe with a window": r"is not computed correctly by Podium's packed forward pass: its logprobs differ",
    "phimoe with longrope": r"is not computed correctly by Podium's packed forward pass: its logprobs differ",
    "doge": r"is not computed correctly by Podium's packed forward pass: its logprobs differ",
    "lfm2": r"is not computed correctly by Podium's packed forward pass: its logprobs differ",
    "nemotron_h": r"is not computed correctly by Podium's packed forward pass: its logprobs differ",
    "gemma2": r"this model soft-caps its attention scores",
    "mpt": r"cannot run with Podium's packed forward pass",
}


@pytest.mark.parametrize("name", RIGHT)
def test_these_families_are_computed_as_transformers_does(name: str, tmp_path: Path) -> None:
    found, detail = verdict(name, tmp_path)
    assert found == "right", detail


@pytest.mark.parametrize("name", REFUSED)
def test_these_families_are_refused_with_a_sentence(name: str, tmp_path: Path) -> None:
    found, detail = verdict(name, tmp_path)
    assert found == "refused", detail
    assert re.search(REFUSED[name], detail)
    assert re.search(r"use another (architecture|model)", detail)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # PEFT, of experts that it cannot adapt
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_fused_experts_have_no_adapter_and_the_advice_for_them_works(name: str, tmp_path: Path) -> None:
    (tmp_path / "every").mkdir()
    found, detail = verdict(name, tmp_path / "every", lora=True)
    assert found == "refused", detail
    assert 'set model.lora.targets = ["q_proj", "v_proj"]' in detail
    (tmp_path / "advised").mkdir()
    assert verdict(name, tmp_path / "advised", lora={"targets": ["q_proj", "v_proj"]})[0] == "right"


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], r".*\.(q|down)_proj"])
def test_adapters_of_a_wrapper_are_in_its_text_model_only_and_all_train(name, targets, tmp_path: Path) -> None:
    """No text goes through a tower for pictures, whose layers have the same names."""
    saved(name, tmp_path / "model")
    settings = Settings.from_dict(tables_of(tmp_path, {"targets": targets}, "float32"))
    policy = load_policy(settings.model, seed=0)
    inside = set(policy.model.get_decoder().modules())
    adapted = {path: layer for path, layer in policy.model.named_modules() if hasattr(layer, "lora_A")}
    assert all(layer in inside for layer in adapted.values())
    kinds = {path.rpartition(".")[2] for path in adapted}
    assert kinds >= {"q_proj", "down_proj"}
    assert ("o_proj" in kinds) == (targets == "all-linear")
    trainer = Single(policy, Objective(grpo), lr=0.01)
    before = {path: tensor.clone() for path, tensor in policy.named_weights()}
    assert step(trainer, [[0, 1], [2, 3]]).updated
    after = dict(policy.named_weights())
    assert [path for path in before if path.endswith("lora_B") and before[path].equal(after[path])] == []
    trainer.save_model(str(tmp_path / "adapter"))
    loaded = load_policy(settings.model, seed=1, weights=tmp_path / "adapter")
    assert all(tensor.equal(after[path]) for path, tensor in loaded.named_weights())
    assert {path for path, _ in loaded.named_weights()} == set(after)


@pytest.mark.parametrize("targets", [["fc1", "fc2"], r".*vision_tower.*q_proj"])
def test_targets_in_a_tower_only_are_refused(targets, tmp_path: Path) -> None:
    saved("gemma3", tmp_path / "model")
    settings = Settings.from_dict(tables_of(tmp_path, {"targets": targets}, "float32"))
    with pytest.raises(InputError, match=r"^model\.lora\.targets = .*: no layer of the text model has such a name"):
        load_policy(settings.model, seed=0)


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT, before it is refused
def test_the_head_of_a_wrapper_is_refused_as_that_of_any_model(tmp_path: Path) -> None:
    saved("gemma3", tmp_path / "model")
    settings = Settings.from_dict(tables_of(tmp_path, {"targets": ["q_proj", "lm_head"]}, "float32"))
    with pytest.raises(InputError, match="lm_head is the LM head, which cannot have an adapter here"):
        load_policy(settings.model, seed=0)


def test_a_context_that_ends_early_is_told(tmp_path: Path) -> None:
    saved("phi3 with longrope", tmp_path / "model")
    settings = Settings.from_dict(tables_of(tmp_path, False, "float32"))
    with pytest.warns(UserWarning, match="prompt and answer may have 32 tokens together, not 128"):
        assert load_policy(settings.model, seed=0).max_context_tokens == 32
