"""`podium push` against a hub on this machine that keeps what arrives."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.export import export
from tests import commands
from tests.exporting import greedy, plain_model, trained_run
from tests.hub_stand_in import Hub, hub_stand_in


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_run(tmp_path_factory.mktemp("push"), eval={})


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_stand_in() as made:
        yield made


def push(
    home: Path, *arguments: str, endpoint: str, token: str | None, is_fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """The library reads its endpoint when it is imported: a process that is not fresh has what it made of that."""
    unwanted = ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy", "ALL_PROXY")
    environment = {key: value for key, value in os.environ.items() if key not in unwanted}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    environment |= {"HF_TOKEN": token} if token else {}
    if is_fresh:
        command = [sys.executable, "-m", "podium.cli", "push", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    known = {"ENDPOINT": endpoint, "HF_TOKEN_PATH": str(home / "token"), "HF_HUB_OFFLINE": False}
    known |= {"HF_STORED_TOKENS_PATH": str(home / "tokens"), "HF_HUB_DISABLE_XET": True}
    constants = {f"huggingface_hub.constants:{name}": value for name, value in known.items()}
    environment |= {"HF_HUB_OFFLINE": "0"}
    return commands.podium("push", *arguments, environment=environment, constants=constants)


def test_what_arrives_is_what_export_writes(run: Path, hub: Hub, tmp_path: Path) -> None:
    done = push(tmp_path, str(run), "me/sums", "--merge", "--private", endpoint=hub.url, token=hub.token, is_fresh=True)
    assert done.returncode == 0, done.stderr
    made = hub.repositories["me/sums"]
    assert made.get("visibility") == "private" or made.get("private") is True  # by the library's version
    expected = export(str(run), tmp_path / "expected", merge=True)
    assert {name: len(data) for name, data in hub.files.items()} == expected.files
    for name, data in hub.files.items():
        assert data == (tmp_path / "expected" / name).read_bytes(), name
    arrived = tmp_path / "arrived"
    arrived.mkdir()
    for name, data in hub.files.items():
        (arrived / name).write_bytes(data)
    assert greedy(*plain_model(arrived)) == greedy(*plain_model(tmp_path / "expected"))
    assert done.stdout.strip().endswith("/me/sums")


def test_a_dry_run_sends_nothing_and_needs_no_account(run: Path, hub: Hub, tmp_path: Path) -> None:
    done = push(tmp_path, str(run), "me/sums", "--dry-run", endpoint=hub.url, token=None)
    assert done.returncode == 0, done.stderr
    assert "adapter_model.safetensors" in done.stdout
    assert "nothing was sent" in done.stdout
    assert hub.repositories == {}
    assert hub.files == {}


def test_without_a_token_or_a_hub_it_is_refused_before_anything_is_made(run: Path, hub: Hub, tmp_path: Path) -> None:
    done = push(tmp_path, str(run), "me/sums", endpoint=hub.url, token=None)
    assert done.returncode == 2
    assert "no token for the model hub" in done.stderr
    done = push(tmp_path, str(run), "me/sums", endpoint="http://127.0.0.1:9", token="hf_some")
    assert done.returncode == 2
    assert "the model hub cannot be reached from here; `podium export` writes the same folder" in done.stderr
    done = push(tmp_path, str(run), "no/such/name", endpoint=hub.url, token=hub.token)
    assert done.returncode == 2
    assert "is not a valid repository name" in done.stderr


def test_a_refusal_of_the_hub_is_told_without_a_traceback(run: Path, hub: Hub, tmp_path: Path) -> None:
    for name, token in (("other/sums", hub.token), ("me/sums", "hf_wrong")):
        done = push(tmp_path, str(run), name, endpoint=hub.url, token=token)
        assert done.returncode == 1, done.stdout
        assert f"podium: the hub rejected {name}: " in done.stderr
        assert "Traceback" not in done.stderr
    assert hub.files == {}
