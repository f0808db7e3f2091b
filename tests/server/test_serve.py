"""`podium serve` as a command, and runs that sample from it."""

import json
import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from podium import cli
from tests.commands import podium
from tests.conftest import small_tables
from tests.server.serving import Running, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("server"), "--model.device=cpu", tcp=True) as running:
        yield running


def settings_file(folder: Path, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tables = small_tables(folder / "run", steps=14, prompts_per_step=8, rollouts_per_prompt=8)
    path = folder / "settings.toml"
    path.write_text(tomli_w.dumps(tables | changes))
    return path


def rewards(folder: Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["reward/mean"] for line in lines if "reward/mean" in line]


@pytest.mark.parametrize("lora", [True, False], ids=["adapter", "disk"])
def test_a_run_through_the_server_learns_as_one_in_process_does(lora: bool, server: Running, tmp_path: Path) -> None:
    model = {"name": "embedded", "device": "cpu"} | ({} if lora else {"lora": False})
    trainer = {"lr": 1e-3 if lora else 1e-4}
    assert cli.main(["train", str(settings_file(tmp_path / "in", model=model, trainer=trainer))]) == 0
    engine = {"name": "vllm_server", **server.engine_options}
    path = settings_file(tmp_path / "served", model=model, trainer=trainer, engine=engine)
    assert cli.main(["train", str(path)]) == 0
    expected, found = rewards(tmp_path / "in"), rewards(tmp_path / "served")
    assert found == pytest.approx(expected, abs=1e-6)  # same seeds, same weights: the same rollouts
    assert sum(found[-4:]) / 4 > sum(found[:4]) / 4 + 0.1
    events = [json.loads(line) for line in (tmp_path / "served" / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["policy_version"] for event in events if event["event"] == "pushed"] == list(range(15))
    with server.client() as http:
        assert http.get("/info").json()["claimed_by"] is None


def test_a_server_killed_in_mid_run_ends_the_run_with_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path / "server", "--model.device=cpu") as server:
        engine = {"name": "vllm_server", **server.engine_options, "silence_s": 5}
        path = settings_file(tmp_path / "run", engine=engine)
        events = tmp_path / "run" / "run" / "events.jsonl"

        def strike() -> None:
            while not (events.exists() and events.read_text().count("pushed") >= 3):
                time.sleep(0.05)
            os.kill(server.process.pid, signal.SIGKILL)

        killer = threading.Thread(target=strike, daemon=True)
        killer.start()
        assert cli.main(["train", str(path)]) == 1
        killer.join(30)
        assert f"engine {server.url}" in capsys.readouterr().err
        assert "EngineError" in (tmp_path / "run" / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "::", "localhost"])
def test_a_port_without_a_token_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "embedded", "--host", host, "--port", "0"]) == 2
    assert "give --token-file" in capsys.readouterr().err


def test_a_routable_bind_without_a_token_does_not_start() -> None:
    done = podium("serve", "embedded", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "--token-file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--token-file", "{tmp}/short"], "at least 16 characters"),
        (["--token-file", "{tmp}/empty"], "at least 16 characters"),
        (["--token-file", "{tmp}/no/folder/token"], "No such file"),
        (["--uds", "{tmp}/" + "x" * 120], "at most 100 bytes"),
        (["--uds", "{tmp}/s", "--loss.name=grpo"], "takes no --loss.name"),
        (["--uds", "{tmp}/s", "--engine", "nothing"], "is not known"),
        (["--uds", "{tmp}/s", "--tp", "2"], "tensor_parallel"),
        (["--uds", "{tmp}/s", "--engine", "vllm_server"], "is a client of a server"),
        (["--uds", "{tmp}/s", "--engine", "vllm_local", "--engine.sleep=true"], "--engine.sleep has no effect"),
        (["--uds", "{tmp}/s", "--token-file", "{tmp}/good", "--host", "no such host"], "have no effect"),
    ],
)
def test_bad_flags_are_told_before_the_model_is_loaded(
    flags: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in {"short": "abc", "empty": "", "good": "x" * 20}.items():
        (tmp_path / name).write_text(content)
    assert cli.main(["serve", "embedded", *(flag.format(tmp=tmp_path) for flag in flags)]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "s").exists()


def test_a_made_up_token_and_a_socket_are_this_users_alone(server: Running, tmp_path: Path) -> None:
    assert server.token_file is not None
    assert stat.S_IMODE(server.token_file.stat().st_mode) == 0o600
    assert len(server.token) >= 40
    with serving(tmp_path, "--model.device=cpu") as private:
        place = Path(private.url.removeprefix("unix:"))
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        assert cli.main(["serve", "embedded", "--uds", str(place)]) == 2  # another server listens there
    assert private.process.returncode == 128 + signal.SIGTERM
    assert not place.exists()


def test_a_trained_adapter_and_a_run_are_served(tmp_path: Path) -> None:
    """By the run's folder; its answers are not the base model's."""
    path = settings_file(tmp_path / "trained", trainer={"lr": 5e-3})
    assert cli.main(["train", str(path), "--run.steps=3"]) == 0
    run = tmp_path / "trained" / "run"
    body = {"prompt_token_ids": [1, 5, 9, 11], "max_tokens": 8, "seeds": [1]}
    logprobs = []
    for model in (str(run), str(run / "final"), "embedded"):
        with (
            serving(tmp_path / f"s{len(logprobs)}", "--model.device=cpu", model=model) as server,
            server.client() as http,
        ):
            logprobs.append(http.post("/generate", json=body).json()["logprobs"])
    assert logprobs[0] == logprobs[1]
    assert logprobs[0] != logprobs[2]
