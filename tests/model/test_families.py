"""Of every family either the engine and the trainer compute what transformers does, or it is refused with a sentence.

A part of the sweep of `tests/families.py`, chosen for what can go wrong: windows by the mask alone, rotary frequencies
that depend on the length, values narrower than keys, routing at random, wrappers, attention code of its own.
"""

import re
from pathlib import Path

import pytest

from tests.families import verdict

RIGHT = [
    *("llama", "qwen3", "gpt2", "olmo3", "gemma3", "gemma4_text", "qwen3_moe"),
    *("qwen2 with a window", "mistral with a window", "qwen2_moe with a window"),
    *("phi3 with longrope", "llama with longrope", "llama with dynamic rope", "llama with yarn rope"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"),
]
REFUSED = {
    "falcon": r"cannot be used: its architecture has attention code of its own",
    "gptj": r"cannot be used: its architecture has attention code of its own",
    "llama4": r"the decoder of a Llama4ForCausalLM gives no hidden states",
    "phimoe": r"is not computed rightly by Podium's packed forward pass: its logprobs differ",
    "phimoe with a window": r"is not computed rightly by Podium's packed forward pass: its logprobs differ",
    "phimoe with longrope": r"is not computed rightly by Podium's packed forward pass: its logprobs differ",
    "doge": r"is not computed rightly by Podium's packed forward pass: its logprobs differ",
    "lfm2": r"is not computed rightly by Podium's packed forward pass: its logprobs differ",
    "nemotron_h": r"is not computed rightly by Podium's packed forward pass: its logprobs differ",
    "gemma2": r"this model soft-caps its attention scores",
    "mpt": r"cannot run: Podium's packed forward pass does not suit it",
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


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys")  # PEFT, of experts that it cannot adapt
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_fused_experts_have_no_adapter_and_the_advice_for_them_works(name: str, tmp_path: Path) -> None:
    (tmp_path / "every").mkdir()
    found, detail = verdict(name, tmp_path / "every", lora=True)
    assert found == "refused", detail
    assert 'set model.lora.targets = ["q_proj", "v_proj"]' in detail
    (tmp_path / "advised").mkdir()
    assert verdict(name, tmp_path / "advised", lora={"targets": ["q_proj", "v_proj"]})[0] == "right"
