"""What was trained, taken away: it answers as the run did, in libraries that know nothing of Podium."""

import json
import re
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.cli import main
from podium.errors import ParityError
from podium.export import export
from podium.model.load import EMBEDDED
from podium.run.start import evaluate
from podium.settings.tables import Settings
from tests.exporting import greedy, plain_model, trained_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("export"))


def base_and_adapter(adapter: Path) -> tuple[Any, Any]:
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    return PeftModel.from_pretrained(base, str(adapter)), AutoTokenizer.from_pretrained(EMBEDDED)


def test_merged_weights_answer_greedily_as_base_and_adapter_do(run: Path, tmp_path: Path) -> None:
    made = export(str(run), tmp_path / "merged", merge=True)
    expected = greedy(*base_and_adapter(run / "final"))
    assert greedy(*plain_model(tmp_path / "merged")) == expected
    assert greedy(*plain_model(EMBEDDED)) != expected  # the adapter does something
    assert made.kind == "model"
    assert made.gap is not None
    assert made.gap < 1e-3


def test_merged_weights_have_all_that_a_model_folder_needs(run: Path, tmp_path: Path) -> None:
    made = export(str(run), tmp_path / "merged", merge=True)
    assert set(made.files) == {
        "README.md", "chat_template.jinja", "config.json", "curve.svg", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert not any("lora" in name for name in load_file(tmp_path / "merged" / "model.safetensors"))
    tables = Settings.from_toml(run / "settings.toml").to_dict()
    here = evaluate(Settings.from_dict(tables | {"model": {"name": str(tmp_path / "merged"), "device": "cpu"}}))
    assert here["eval/accuracy"] == evaluate(Settings.from_dict(tables), run / "final")["eval/accuracy"]


def test_an_adapter_is_exported_as_it_is(run: Path, tmp_path: Path) -> None:
    made = export(str(run), tmp_path / "adapter")
    assert made.kind == "adapter"
    assert made.gap is None
    assert set(made.files) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "curve.svg"}
    own, given = (load_file(path / "adapter_model.safetensors") for path in (run / "final", tmp_path / "adapter"))
    assert own.keys() == given.keys()
    assert all(torch.equal(own[name], given[name]) for name in own)


def test_an_adapter_folder_can_be_merged_without_its_run(run: Path, tmp_path: Path) -> None:
    export(str(run / "final"), tmp_path / "merged", merge=True)
    assert greedy(*plain_model(tmp_path / "merged")) == greedy(*base_and_adapter(run / "final"))
    assert "Results" not in (tmp_path / "merged" / "README.md").read_text()


def test_a_checkpoint_is_exported_by_its_step(run: Path, tmp_path: Path) -> None:
    export(str(run), tmp_path / "early", step=4)
    export(str(run), tmp_path / "last", step=8)
    early, last, final = (
        load_file(path / "adapter_model.safetensors") for path in (tmp_path / "early", tmp_path / "last", run / "final")
    )
    assert all(torch.equal(last[name], final[name]) for name in final)
    assert not all(torch.equal(early[name], final[name]) for name in final)
    card = (tmp_path / "early" / "README.md").read_text()
    assert "as it was after step 4" in card
    assert "| 8 |" not in card


def test_full_weights_are_exported_as_a_model(tmp_path: Path) -> None:
    run = trained_run(tmp_path, model={"name": "embedded", "device": "cpu", "lora": False})
    made = export(str(run), tmp_path / "out")
    assert made.kind == "model"
    assert greedy(*plain_model(tmp_path / "out")) == greedy(*plain_model(run / "final"))


def test_the_card_is_filled_from_the_run(run: Path, tmp_path: Path) -> None:
    export(str(run), tmp_path / "merged", merge=True)
    card = (tmp_path / "merged" / "README.md").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = [line["eval/accuracy"] for line in lines if line.get("eval")]
    assert f"Held-out accuracy on 16 prompts: {told[0]:.3f} before, {told[-1]:.3f} after." in card
    assert "# run: embedded trained by reinforcement learning" in card
    assert "Rewards: `arithmetic`" in card
    assert str(run) not in card  # where it was trained is nobody's business
    settings = re.search(r"```toml\n(.*?)```", card, re.DOTALL)
    assert settings is not None
    assert 'name = "embedded"' in settings[1]
    assert (tmp_path / "merged" / "curve.svg").read_text().count("<polyline") == 2


@pytest.mark.parametrize("merge", [False, True])
def test_the_cards_code_loads_the_model(run: Path, tmp_path: Path, merge: bool) -> None:
    export(str(run), tmp_path / "out", merge=merge)
    code = re.search(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    assert code is not None
    loaded: dict[str, Any] = {}
    exec(code[1].replace("THIS_FOLDER", str(tmp_path / "out")), loaded)
    assert greedy(loaded["model"], loaded["tokenizer"]) == greedy(*base_and_adapter(run / "final"))


def test_weights_that_answer_otherwise_are_not_exported(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the adapter got lost on the way: what is written is the base."""
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda self, safe_merge: self.unload(), raising=False)
    with pytest.raises(ParityError, match="the written weights give logprobs that differ by"):
        export(str(run), tmp_path / "merged", merge=True)
    assert list(tmp_path.iterdir()) == []


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["export", *arguments]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_exported_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "full exists already; give a new folder" in refusal(capsys, str(run), "full")
    assert "neither a run folder nor an adapter folder" in refusal(capsys, "embedded", "out")
    assert "no checkpoint of step 5; there are: 4, 8" in refusal(capsys, str(run), "out", "--step", "5")
    assert "podium export takes no --run.steps=3" in refusal(capsys, str(run), "out", "--run.steps=3")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_disk_that_takes_no_more_is_reported_and_nothing_is_left(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        said = refusal(capsys, str(run), str(tmp_path / "out"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "out cannot be written" in said
    assert "File too large" in said
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained_run(tmp_path, eval={})
    place = run / "checkpoints" / "step-000004" / "trainer.safetensors"
    tensors = load_file(place)
    save_file({name: tensor + 0 for name, tensor in tensors.items() if name != "num_steps"}, place)
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "4"]) == 1
    assert "is damaged: trainer.safetensors is not what was written" in capsys.readouterr().err


def test_merging_full_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained_run(tmp_path, eval={}, model={"name": "embedded", "device": "cpu", "lora": False})
    assert "--merge has no effect" in refusal(capsys, str(run), str(tmp_path / "out"), "--merge")


def test_export_tells_what_it_wrote(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(tmp_path / "merged"), "--merge"]) == 0
    out = capsys.readouterr().out
    assert "model.safetensors" in out
    assert "compared with base + adapter: logprobs differ by at most" in out
