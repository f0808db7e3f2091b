"""A checkpoint becomes a folder that PEFT or transformers load, with the very weights of that step."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from podium.cli import main
from podium.model.forward import sequence_logprobs
from podium.model.load import load_policy
from podium.run import train
from podium.sections import Model
from podium.settings import Settings
from tests.conftest import small_tables

PROBE = list(range(3, 20))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits at 2 and 4."""
    folder = tmp_path_factory.mktemp("export") / "run"
    train(Settings.from_dict(small_tables(folder)))
    return folder


def test_the_newest_is_what_the_run_ended_with(run: Path, tmp_path: Path, capsys) -> None:
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: an adapter of step 4\n"
    file = "adapter_model.safetensors"
    found, final = load_file(tmp_path / "out" / file), load_file(run / "final" / file)
    assert found.keys() == final.keys()
    assert all(torch.equal(found[name], final[name]) for name in final)


def test_an_older_step_has_its_own_weights(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--step", "2"]) == 0
    file = "adapter_model.safetensors"
    found, final = load_file(tmp_path / "out" / file), load_file(run / "final" / file)
    assert any(not torch.equal(found[name], final[name]) for name in final)


def test_merged_it_is_a_model_that_computes_the_same(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), str(tmp_path / "out"), "--merge"]) == 0
    merged = load_policy(Model(name=str(tmp_path / "out"), device="cpu", lora=False), seed=0)
    adapted = load_policy(Model(device="cpu"), seed=0, weights=run / "final")
    expected = sequence_logprobs(adapted.model, PROBE)
    assert sequence_logprobs(merged.model, PROBE) == pytest.approx(expected, abs=1e-4)
    base = load_policy(Model(device="cpu", lora=False), seed=0)
    assert sequence_logprobs(base.model, PROBE) != pytest.approx(expected, abs=1e-3)


def test_what_cannot_be_done_is_refused(run: Path, tmp_path: Path, capsys) -> None:
    for arguments, message in {
        (str(run), str(tmp_path)): "exists already",
        (str(run), str(tmp_path / "out"), "--step", "3"): "no checkpoint of step 3; there are: 2, 4",
        (str(tmp_path), str(tmp_path / "out")): "is not a run folder",
        (str(run), str(tmp_path / "out"), "--run.steps=3"): "podium export takes no --run.steps=3",
    }.items():
        assert main(["export", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
