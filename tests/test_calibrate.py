"""`engine.name = "auto"`: what is taken, why, and that a resume keeps it."""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from podium import Settings
from podium.check.calibrate import Candidate, choose_engine, measure, pick, without_auto
from podium.errors import InputError
from podium.run.start import evaluate, train
from tests.commands import VLLM, call, podium

TABLES = {
    "run": {"steps": 1, "prompts_per_step": 2, "rollouts_per_prompt": 2},
    "model": {"device": "cpu"},
    "data": [{"name": "arithmetic", "max_rows": 1000}],
    "reward": [{"name": "arithmetic"}],
    "rollout": {"max_new_tokens": 4},
    "report": [],
}
needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")


def an_auto(**changes: object) -> Settings:
    return Settings.from_dict({**TABLES, "engine": {"name": "auto"}, **changes})


@pytest.mark.parametrize(
    ("speeds", "taken"),
    [((100.0, 300.0), "vllm_local"), ((300.0, 100.0), "inprocess"), ((100.0, 105.0), "inprocess")],
    ids=["clearly faster", "slower", "as fast: one copy of the weights is enough"],
)
def test_the_clearly_faster_one_is_taken(speeds: tuple[float, float], taken: str) -> None:
    candidates = [Candidate("inprocess", speeds[0]), Candidate("vllm_local", speeds[1])]
    assert pick(candidates).name == taken


def test_one_that_fails_is_not_taken_and_none_left_is_an_error() -> None:
    broken = Candidate("inprocess", failure="cannot decode this")
    assert pick([broken, Candidate("vllm_local", 1.0)]).name == "vllm_local"
    with pytest.raises(InputError, match="no engine can be used; inprocess: cannot decode this"):
        pick([broken])


def test_without_vllm_the_choice_needs_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.check.calibrate.find_spec", lambda name: None)
    monkeypatch.setattr("podium.check.calibrate.measure", lambda *_: pytest.fail("nothing is to be compared"))
    settings, why = choose_engine(an_auto())
    assert settings.engine.name == "inprocess"
    assert why == "engine inprocess was chosen; vllm_local: vllm is not installed"


def test_what_is_measured_here_says_nothing_of_machines_elsewhere() -> None:
    with pytest.raises(InputError, match=r"engines are elsewhere; name one: inprocess, vllm_local"):
        choose_engine(an_auto(runtime={"name": "ray"}))


def test_another_engine_stays_as_it_is() -> None:
    settings = Settings.from_dict(TABLES)
    assert choose_engine(settings) == (settings, "")


def test_a_candidate_is_measured_in_a_process_that_ends() -> None:
    found = measure(an_auto(), "inprocess")
    assert found.failure == ""
    assert found.tokens_per_s > 0
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    running = [pid for pid in children if b"podium.check.calibrate" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert not running


def test_one_that_does_not_start_says_why() -> None:
    settings = an_auto(data=[{"name": "jsonl", "path": "no/such/rows.jsonl"}])
    found = measure(settings, "inprocess")
    assert "does not start" in found.failure
    assert "no/such/rows.jsonl" in found.failure


def test_one_that_finds_no_room_beside_the_trainer_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    from podium.check import calibrate
    from podium.check.calibrate import try_out, with_engine

    monkeypatch.setattr("podium.runtime.wiring.memory.device_bytes", lambda device: 1000)
    monkeypatch.setattr(calibrate, "make_engine", lambda *_, **__: pytest.fail("it does not fit"))
    found = asyncio.run(try_out(with_engine(an_auto(), "inprocess")))
    assert found.failure == "it does not fit into memory next to the trainer"


def test_the_run_names_what_was_taken_so_a_resume_does_not_choose_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podium.check.calibrate.find_spec", lambda name: None)
    tables = {**TABLES, "run": {**TABLES["run"], "folder": str(tmp_path / "run")}}  # type: ignore[dict-item]
    train(Settings.from_dict({**tables, "engine": {"name": "auto"}}))
    assert Settings.from_toml(tmp_path / "run" / "settings.toml").engine.name == "inprocess"
    first = json.loads((tmp_path / "run" / "events.jsonl").read_text().splitlines()[0])
    assert (first["event"], first["message"][:29]) == ("engine_chosen", "engine inprocess was chosen; ")


def test_an_evaluation_is_too_short_to_measure_for() -> None:
    assert without_auto(an_auto()).engine.name == "inprocess"
    held_out = {"data": [{"name": "arithmetic", "split": "held_out", "max_rows": 2}]}
    assert evaluate(an_auto(eval=held_out))["eval/accuracy"] >= 0


def test_a_server_wants_a_name(tmp_path: Path) -> None:
    ended = podium("serve", "embedded", "--uds", str(tmp_path / "s"), "--engine", "auto")
    assert ended.returncode == 2
    assert "engine.name = 'auto' is for `podium train`; here name one: inprocess, vllm_local" in ended.stderr


@needs_vllm
@pytest.mark.timeout(600)
def test_both_are_measured_where_vllm_is_installed() -> None:
    """From a process that has imported vLLM: what a candidate does in an interpreter of its own is tested above."""
    forked = {"prepare": ["tests.forked_keepers:instead_of_interpreters"], "modules": VLLM}
    done = call(f"{__name__}:choose", **forked)
    assert done.returncode == 0, done.stderr
    name, why = done.stdout.splitlines()[-1].split(": ", 1)
    assert name in ("inprocess", "vllm_local")
    assert why.count("tokens/s") == 2, why


def choose() -> None:
    settings, why = choose_engine(an_auto())
    print(f"{settings.engine.name}: {why}", flush=True)
