"""G14, S1, S2, S3: nothing that is data is ever executed. A gate over the package's source, and canaries: files that
leave a mark if anything runs what they hold."""

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from podium.cli import main
from podium.model.load import EMBEDDED
from podium.run.start import UNTRAINED
from tests.conftest import small_tables

ROOT = Path(podium.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))

CALLS = {"eval", "exec", "__import__", "os.system", "os.popen", "torch.load", "yaml.load", "pty.spawn"}
"""Functions that execute what they are given, or may."""
IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml", "jsonpickle"}
FLAGS = {"weights_only": False, "trust_remote_code": True, "allow_pickle": True, "shell": True}
"""Keyword arguments with the value that they must never have in the source."""


def breaches(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS or name.startswith(("pickle.", "marshal.")):
                yield f"line {node.lineno}: calls {name}"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg in FLAGS and value is FLAGS[keyword.arg]:
                    yield f"line {node.lineno}: {keyword.arg} = {value}"
            if name.endswith(("extractall", ".extract")) and "filter" not in {k.arg for k in node.keywords}:
                yield f"line {node.lineno}: unpacks without filter"
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        yield from (f"line {node.lineno}: imports {name}" for name in names if name.split(".")[0] in IMPORTS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_g14_no_module_can_execute_data(path: Path) -> None:
    """What runs inside the sandbox is there to execute programs, and nothing else of the package is in it."""
    if path.parent != ROOT / "reward" / "sandbox" / "inside":
        assert list(breaches(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "eval(x)", "exec(x)", "import pickle", "from pickle import loads", "torch.load(p)", "__import__(x)",
        "np.load(p, allow_pickle=True)", "load(p, weights_only=False)", "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(n, trust_remote_code=True)", "import yaml", "os.system(x)", "tar.extractall(p)",
    ],
)  # fmt: skip
def test_the_gate_sees_each_kind(source: str) -> None:
    assert len(list(breaches(source))) == 1


class Canary:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._mark}",)


def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED, folder)
    return folder


def trained(tmp_path: Path) -> Path:
    tables = small_tables(tmp_path / "trained", steps=1, prompts_per_step=1, rollouts_per_prompt=2)
    tables["data"][0]["max_rows"] = 2
    assert run(tmp_path, tables) == 0
    return tmp_path / "trained"


def run(tmp_path: Path, tables: dict[str, Any], *arguments: str) -> int:
    import tomli_w

    (tmp_path / "settings.toml").write_text(tomli_w.dumps(tables))
    return main(["train", str(tmp_path / "settings.toml"), *arguments])


def auto_map(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    folder = model_folder(tmp_path)
    (folder / "own.py").write_text(f"import os\nos.system('touch {mark}')\nclass Own: pass\n")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    return {"model": {"name": str(folder), "device": "cpu"}}, 2


def tokenizer_code(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    folder = model_folder(tmp_path)
    (folder / "own.py").write_text(f"import os\nos.system('touch {mark}')\nclass Own: pass\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return {"model": {"name": str(folder), "device": "cpu"}}, 2


def pickled_weights(name: str) -> Callable[[Path, Path], tuple[dict[str, Any], int]]:
    def prepare(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
        folder = model_folder(tmp_path)
        (folder / "model.safetensors").unlink()
        torch.save(Canary(mark), folder / name)
        return {"model": {"name": str(folder), "device": "cpu"}}, 2

    return prepare


def pickle_called_safetensors(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    folder = model_folder(tmp_path)
    (folder / "model.safetensors").write_bytes(pickle.dumps(Canary(mark)))
    return {"model": {"name": str(folder), "device": "cpu"}}, 2


def template_injection(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    folder = model_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(
        f"{{{{ cycler.__init__.__globals__.os.popen('touch {mark}').read() }}}}{{{{ messages[0]['content'] }}}}"
    )
    return {"model": {"name": str(folder), "device": "cpu"}}, 2


def pickled_adapter(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    folder = trained(tmp_path) / "final"
    (folder / "adapter_model.safetensors").unlink()
    torch.save(Canary(mark), folder / "adapter_model.bin")
    return {"checkpoint": {"start_from": str(folder)}}, 2


def adapter_with_a_library(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    """PEFT's `auto_mapping` names a module to import."""
    folder = trained(tmp_path) / "final"
    (tmp_path / "evil_library.py").write_text(f"import os\nos.system('touch {mark}')\n")
    config = json.loads((folder / "adapter_config.json").read_text())
    config["auto_mapping"] = {"base_model_class": "X", "parent_library": "evil_library"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return {"checkpoint": {"start_from": str(folder)}}, 0


def pickled_checkpoint(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    """With a manifest that is right for it."""
    from podium.run.checkpoint import describe_file

    place = trained(tmp_path) / "checkpoints" / "step-000001"
    (place / "trainer.safetensors").write_bytes(pickle.dumps(Canary(mark)))
    manifest = {name: describe_file(place / name) for name in ("settings.toml", "state.json", "trainer.safetensors")}
    (place / "manifest.json").write_text(json.dumps(manifest, indent=1))
    return {"checkpoint": {"start_from": str(place)}}, 2


def rows_of_code(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    code = f"__import__('os').system('touch {mark}')"
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": code, "answer": code}) + "\n")
    return {"data": [{"name": "jsonl", "path": str(tmp_path / "rows.jsonl")}], "reward": [{"name": "exact"}]}, UNTRAINED


def pickled_rows(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    (tmp_path / "rows.jsonl").write_bytes(pickle.dumps(Canary(mark)))
    return {"data": [{"name": "jsonl", "path": str(tmp_path / "rows.jsonl")}], "reward": [{"name": "exact"}]}, 2


def dataset_script(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    folder = tmp_path / "table"
    folder.mkdir()
    (folder / "table.py").write_text(f"import os\nos.system('touch {mark}')\n")
    return {"data": [{"name": "hub", "path": str(folder)}]}, 2


def yaml_tag(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    return {"model": {"name": f"!!python/object/apply:os.system ['touch {mark}']"}}, 2


def shell_in_a_value(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    return {
        "run": {"folder": str(tmp_path / "run" / f"$(touch {mark.name}) `touch {mark.name}`")},
        "checkpoint": {"on_checkpoint": "true"},
    }, 0


def environment_in_a_value(tmp_path: Path, mark: Path) -> tuple[dict[str, Any], int]:
    return {"rollout": {"system": "${oc.env:SECRET_OF_THE_TEST} $SECRET_OF_THE_TEST"}}, 0


CANARIES = {
    "S1 a model's own code": auto_map,
    "S1 a tokenizer's own code": tokenizer_code,
    "S2 weights as pytorch_model.bin": pickled_weights("pytorch_model.bin"),
    "S2 weights as model.pt": pickled_weights("model.pt"),
    "S2 a pickle called safetensors": pickle_called_safetensors,
    "a chat template that reaches for the system": template_injection,
    "an adapter as a pickle": pickled_adapter,
    "an adapter that names a library": adapter_with_a_library,
    "a checkpoint whose tensors are a pickle": pickled_checkpoint,
    "rows of code": rows_of_code,
    "rows as a pickle": pickled_rows,
    "a dataset's script": dataset_script,
    "S3 a YAML tag": yaml_tag,
    "S3 a shell's words in a name": shell_in_a_value,
    "S3 the environment in a value": environment_in_a_value,
}


def test_the_corpus_has_the_size_that_is_asked_for() -> None:
    assert len(CANARIES) >= 12


@pytest.mark.parametrize("name", CANARIES)
def test_g14_no_canary_is_executed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TEST", "open-sesame")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    mark = tmp_path / "executed"
    changes, expected = CANARIES[name](tmp_path, mark)
    tables = small_tables(tmp_path / "run", steps=1, prompts_per_step=1, rollouts_per_prompt=2)
    tables["data"][0]["max_rows"] = 2
    for section, given in changes.items():
        tables[section] = {**tables.get(section, {}), **given} if isinstance(given, dict) else given
    assert run(tmp_path, tables) == expected
    assert not mark.exists()
    for path in (tmp_path / "run").rglob("*"):
        assert not path.is_file() or b"open-sesame" not in path.read_bytes()


def test_the_canary_would_sing(tmp_path: Path) -> None:
    """Or its silence would say nothing."""
    pickle.loads(pickle.dumps(Canary(tmp_path / "executed")))
    assert (tmp_path / "executed").exists()


def test_s2_podium_unpacks_no_archives() -> None:
    """A tar with links or `../` has nowhere to go. Packing is another matter."""
    for path in MODULES:
        called = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not called & {"extract", "extractall", "extractfile", "unpack_archive"}, path


SECRETS = {
    "an option called so": {"reward": [{"name": "judge", "api_key": "sk-123"}]},
    "a URL with a password": {"data": [{"name": "jsonl", "path": "https://me:open-sesame@example.org/rows.jsonl"}]},
}


@pytest.mark.parametrize("kind", SECRETS)
def test_s3_secrets_are_refused_in_settings_and_never_repeated(kind: str, tmp_path: Path, capsys) -> None:
    assert run(tmp_path, small_tables(tmp_path / "run") | SECRETS[kind]) == 2
    told = capsys.readouterr().err
    assert "open-sesame" not in told
    assert "sk-123" not in told
    assert not (tmp_path / "run").exists()
