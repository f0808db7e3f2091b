"""Rewards that misbehave, through the command line and a real run."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from podium.cli import main
from podium.reward.sandbox import _problem
from tests.commands import fork_server
from tests.conftest import small_tables
from tests.reward.judging import Reply, answer_in, serving, verdict

REWARDS = r'''
import os, time
from podium import Prompt, Rollout, declare_range, register_reward, runs_inline
from podium.reward.arithmetic import arithmetic

@declare_range(0.0, 1.2)
def unreliable(prompt: Prompt, rollout: Rollout, *, victim: int = 0) -> float:
    """Hangs, dies or raises on three of the four rollouts of one prompt."""
    if prompt.ordinal == victim and rollout.sample_index == 0:
        time.sleep(600)
    if prompt.ordinal == victim and rollout.sample_index == 1:
        os._exit(0)
    if prompt.ordinal == victim and rollout.sample_index == 2:
        raise KeyError("nope")
    return arithmetic(prompt, rollout)

@declare_range(0.0, 1.2)
def whole_group(prompt, rollouts):
    return [arithmetic(prompt, rollout) for rollout in rollouts]

@declare_range(0.0, 1.2)
async def later(prompt, rollout):
    return arithmetic(prompt, rollout)

def one_short(prompt, rollouts):
    return [0.0] * (len(rollouts) - 1)

def hangs(prompt, rollout):
    with open("pids", "a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\n")
    time.sleep(600)

@register_reward("halved")
class Halved:
    """Made where the workers come from; its raw values are twice as large."""
    min_value, max_value, weight = 0.0, 2.4, 1.2

    def __init__(self, *, factor: float = 2.0):
        with open("made", "a") as file:
            file.write(f"{os.getpid()}\n")
        self.factor = factor

    def __call__(self, prompt, rollout):
        return self.factor * arithmetic(prompt, rollout)

@register_reward("halved_group")
class HalvedGroup(Halved):
    async def __call__(self, prompt, rollouts):
        return [self.factor * arithmetic(prompt, rollout) for rollout in rollouts]

class Unregistered:
    def __call__(self, prompt, rollout):
        return 0.0

@declare_range(0.0, 1.0)
def even(prompt, rollout):
    return float(int(prompt.answer) % 2 == 0)

@declare_range(0.0, 1.0)
def wants_weight(prompt, rollout, *, weight: float = 1.0):
    return weight

@runs_inline
@declare_range(0.0, 1.2)
def inline(prompt, rollout):
    return arithmetic(prompt, rollout)
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    return tmp_path


def write(here: Path, reward: dict[str, Any], **sections: Any) -> str:
    tables = small_tables(here / "run", steps=2) | {"reward": [reward]}
    for section, keys in sections.items():
        tables[section] = tables.get(section, {}) | keys
    (here / "run.toml").write_text(tomli_w.dumps(tables))
    return str(here / "run.toml")


def rollouts_of(here: Path) -> list[dict[str, Any]]:
    files = sorted((here / "run" / "rollouts").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def ledger_of(here: Path) -> list[dict[str, Any]]:
    return [{**line, "reward_parts": list(line["reward_parts"].values())} for line in rollouts_of(here)]


def test_a_run_goes_on_past_rewards_that_hang_die_and_raise(here: Path) -> None:
    reward = {"name": "rewards.py:unreliable", "timeout_s": 0.5}
    assert main(["train", write(here, reward, scoring={"max_failed_share": 0.5})]) == 0
    lines = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["reward/failed"] for line in lines] == [3.0, 0.0]
    missing = [(line["ordinal"], line["sample_index"]) for line in rollouts_of(here) if line["reward"] is None]
    assert missing == [(0, 0), (0, 1), (0, 2)]


def test_above_the_allowed_share_the_reasons_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = write(here, {"name": "rewards.py:unreliable", "timeout_s": 0.5})
    assert main(["train", settings]) == 1
    message = capsys.readouterr().err
    assert "3 of 16 reward calls gave no number" in message
    line = next(n for n, text in enumerate((here / "rewards.py").read_text().splitlines(), 1) if "nope" in text)
    raised = f"KeyError at rewards.py:{line}: 'nope' (×1)"
    for reason in ("timeout after 0.5 s (×1)", "its process exited with code 0 (×1)", raised):
        assert f"rewards.py:unreliable: {reason}" in message


@pytest.mark.parametrize("name", ["whole_group", "later", "inline"])
def test_every_way_to_write_a_reward_gives_the_same_run(name: str, here: Path) -> None:
    assert main(["train", write(here, {"name": "arithmetic"})]) == 0
    expected = ledger_of(here)
    (here / "run").rename(here / "first")
    assert main(["train", write(here, {"name": f"rewards.py:{name}"})]) == 0
    assert ledger_of(here) == expected


@pytest.mark.parametrize("name", ["halved", "Halved", "halved_group"])
def test_a_registered_class_runs_in_the_workers_normalised_with_its_own_weight(name: str, here: Path) -> None:
    assert main(["train", write(here, {"name": "arithmetic"})]) == 0
    expected = [line["reward"] for line in rollouts_of(here)]
    (here / "run").rename(here / "first")
    assert main(["train", write(here, {"name": f"rewards.py:{name}"})]) == 0
    # weight 1.2 · (2 · reward) / 2.4
    assert [line["reward"] for line in rollouts_of(here)] == pytest.approx(expected)
    makers = (here / "made").read_text().split()
    assert len(makers) == 1
    assert int(makers[0]) != os.getpid()


def test_a_format_reward_gates_what_rows_name_by_another_name(here: Path) -> None:
    rows = [{"prompt": f"What is 1{n} + 20?", "answer": f"3{n}", "reward": "sums"} for n in range(4)]
    (here / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    data = {"name": "jsonl", "path": "rows.jsonl", "remap": {"sums": "arithmetic"}}
    tables = small_tables(here / "run", steps=1) | {"data": [data]}
    tables |= {"reward": [{"name": "rewards.py:even", "format": "gate"}, {"name": "arithmetic", "weight": 10.0}]}
    (here / "run.toml").write_text(tomli_w.dumps(tables))
    assert main(["train", str(here / "run.toml")]) == 0
    lines = rollouts_of(here)
    assert {line["reward_parts"]["rewards.py:even"] for line in lines} == {0.0, 1.0}
    for line in lines:
        parts = line["reward_parts"]
        assert line["reward"] == pytest.approx(10 * parts["arithmetic"] * parts["rewards.py:even"])


def test_a_judge_scores_a_run_and_its_tokens_are_in_the_metrics(here: Path) -> None:
    def respond(number: int, text: str) -> Reply:
        return Reply(status=503) if number == 1 else Reply(verdict(text, len(answer_in(text)) % 11))

    with serving(respond) as server:
        reward = {"name": "judge", "base_url": server.base_url, "model": "m", "retry_s": 0.01, "price_in": 5.0}
        assert main(["train", write(here, reward)]) == 0
    lines = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    # 4 prompts × 4 rollouts a step, and one request of the first had to be repeated
    assert [line["reward/judge_requests"] for line in lines] == [17.0, 16.0]
    assert [line.get("reward/judge_retries") for line in lines] == [1.0, None]
    assert [line["reward/judge_cost"] for line in lines] == pytest.approx([1600 * 5e-6] * 2)
    assert len(server.texts) == 33
    for line in rollouts_of(here):
        assert line["reward"] == pytest.approx(len(line["text"]) % 11 / 10)


def test_what_a_judge_costs_in_an_evaluation_is_told_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda number, text: Reply(verdict(text, 5))) as server:
        reward = {"name": "judge", "base_url": server.base_url, "model": "m"}
        held_out = {"data": [{"name": "arithmetic", "split": "held_out", "max_rows": 3}]}
        assert main(["eval", "embedded", write(here, reward, eval=held_out), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert (metrics["eval/judge_requests"], metrics["eval/judge_tokens_out"]) == (3.0, 60.0)


def test_a_list_that_is_too_short_stops_the_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", write(here, {"name": "rewards.py:one_short"})]) == 1
    assert "reward 'rewards.py:one_short' on prompt 0 (arithmetic) returned 3 values for 4 rollouts" in (
        capsys.readouterr().err
    )


def test_no_process_is_left_when_the_run_is_killed(here: Path) -> None:
    settings = write(here, {"name": "rewards.py:hangs", "timeout_s": 600.0})
    run = fork_server().start("train", settings, stdout=here / "out", stderr=here / "out")
    pids: set[int] = set()
    end = time.monotonic() + 60
    while len(pids) < 2 and time.monotonic() < end:
        time.sleep(0.1)
        pids = {int(pid) for pid in Path("pids").read_text().split()} if Path("pids").exists() else set()
    assert len(pids) >= 2
    run.kill()
    run.wait(timeout=30)
    end = time.monotonic() + 5
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a limit for what has none": (
        {"name": "arithmetic", "timeout_s": 3.0},
        {},
        "reward[0].timeout_s has no effect: arithmetic needs no time limit; remove it",
    ),
    "memory for nothing": (
        {"name": "arithmetic"},
        {"worker_memory_mb": 100},
        "scoring.worker_memory_mb has no effect: no reward of this run needs a worker process; remove it",
    ),
    "the weight of a gate": (
        {"name": "arithmetic", "format": "gate", "weight": 2.0},
        {},
        "reward[0].weight has no effect: a gate takes no part in the sum; remove it",
    ),
    "a gate without a highest value": (
        {"name": "rewards.py:one_short", "format": "gate"},
        {},
        "reward 'rewards.py:one_short' with format = 'gate': it does not declare its highest value, so when it lets "
        "the others through is not known; put podium.declare_range(lowest, highest) on it",
    ),
    "a format and nothing else": (
        {"name": "arithmetic", "format": "add"},
        {},
        "the only reward is for the format, 'arithmetic'; add a [[reward]] table without 'format'",
    ),
    "a class that is not registered": (
        {"name": "rewards.py:Unregistered"},
        {},
        "reward.name = 'rewards.py:Unregistered' is a class; put @podium.register_reward(\"name\") on it",
    ),
    "an option that is a key of the table": (
        {"name": "rewards.py:wants_weight"},
        {},
        "reward[0]: rewards.py:wants_weight has an option 'weight', which is a key of the table; rename it",
    ),
    "the started script": (
        {"name": "__main__:main"},
        {},
        "reward.name = '__main__:main': a worker process cannot import the script that was started; put the reward "
        "into a file of its own and name it 'file.py:main'",
    ),
    "limits that contradict each other": (
        {"name": "code", "total_s": 20.0},
        {},
        "reward.timeout_s = 10 is not above total_s = 20: a program that takes too long would abstain instead of "
        "failing; raise the one or lower the other",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_without_effect_or_sense_is_refused(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reward, scoring, message = REFUSED[name]
    monkeypatch.setattr(sys.modules["__main__"], "main", main, raising=False)
    assert main(["train", write(here, reward, scoring=scoring)]) == 2
    assert capsys.readouterr().err == f"podium: {message}\n"
    assert not (here / "run").exists()


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_missing_sandbox_is_refused_before_the_model_is_loaded(
    command: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("podium.runtime.wiring.trainer.load_policy", None)
    monkeypatch.setattr("podium.check.verdicts.load_policy", None)
    _problem.cache_clear()
    try:
        assert main([command, write(here, {"name": "code_stdio"})]) == 2
        assert "sandbox = 'bubblewrap': bwrap is not installed" in capsys.readouterr().err
    finally:
        _problem.cache_clear()


@pytest.mark.skipif(_problem("bubblewrap") is not None, reason="no sandbox here")
def test_rows_may_name_the_verifiers_of_programs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"prompt": "What is 1 + 2?", "answer": ["assert add(1, 2) == 3"], "reward": "code"},
        {"prompt": "What is 1 + 3?", "answer": [{"input": "1", "output": "2"}], "reward": "code_stdio"},
    ]
    (here / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    tables = small_tables(here / "run") | {"data": [{"name": "jsonl", "path": "rows.jsonl"}], "reward": []}
    (here / "run.toml").write_text(tomli_w.dumps(tables))
    assert main(["check", str(here / "run.toml")]) == 0
    out = capsys.readouterr().out
    assert out.count("reward 0.0") == 8  # the model writes no programs
    assert "failed" not in out
