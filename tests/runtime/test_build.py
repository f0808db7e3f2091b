"""Settings that must reach the stages of a real run."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.check.verdicts import check
from podium.errors import InputError
from podium.pack import pack
from podium.records import Batch, Prompt, Rollout, UpdateResult
from podium.run.start import train
from podium.runtime.wiring.trainer import train_step
from podium.settings.tables import Settings
from tests.builders import make_group
from tests.conftest import small_tables


def rollouts_of(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "rollouts").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_the_penalty_of_the_settings_reaches_the_rewards(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run", steps=1)
    tables["rollout"]["max_new_tokens"] = 16  # some answers of this model are longer, some are not
    tables["filter"] = {"truncated": -3.0}
    train(Settings.from_dict(tables))
    by_end = {"stop": set(), "length": set()}
    for line in rollouts_of(tmp_path / "run"):
        by_end[line["finish_reason"]].add(line["reward"])
    assert by_end["length"] == {-3.0}
    assert by_end["stop"]
    assert -3.0 not in by_end["stop"]


def boundless(prompt: Prompt, rollout: Rollout) -> float:
    """A reward that declares no range."""
    return float(len(rollout.text))


BOUNDLESS = "tests.runtime.test_build:boundless"


def rows_scored_by(path: Path, *rewards: str) -> list[dict[str, Any]]:
    rows = [{"prompt": f"What is 1{n} + 20?", "answer": f"3{n}", "reward": name} for n, name in enumerate(rewards)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [{"name": "jsonl", "path": str(path)}]


def retiring(folder: Path, *rewards: str) -> dict[str, Any]:
    """Settings that retire rows, each row scored by the reward of its place."""
    tables = small_tables(folder / "run", steps=1)
    tables |= {"filter": {"retire_pass_rate": 0.9}, "reward": [], "data": rows_scored_by(folder / "a.jsonl", *rewards)}
    return tables


@pytest.mark.parametrize("command", [train, check])
def test_rows_cannot_be_retired_where_no_rollout_is_known_to_be_correct(tmp_path: Path, command: Callable) -> None:
    settings = Settings.from_dict(retiring(tmp_path, "exact", BOUNDLESS))
    with pytest.raises(InputError) as caught:
        command(settings)
    assert str(caught.value) == (
        f"filter.retire_pass_rate = 0.9: reward {BOUNDLESS!r} does not declare its highest value, so no rollout is "
        "known to be correct; put podium.declare_range(lowest, highest) on it, or remove the setting"
    )
    assert not (tmp_path / "run").exists()


def test_only_the_rewards_of_the_training_rows_must_be_known(tmp_path: Path) -> None:
    tables = retiring(tmp_path, "exact", "arithmetic")
    tables["eval"] = {"data": rows_scored_by(tmp_path / "held_out.jsonl", BOUNDLESS)}
    assert train(Settings.from_dict(tables)).step == 1


def test_a_reward_without_a_highest_value_is_fine_where_nothing_is_retired(tmp_path: Path) -> None:
    tables = retiring(tmp_path, BOUNDLESS)
    del tables["filter"]
    assert train(Settings.from_dict(tables)).step == 1


def test_a_program_cannot_be_promised_more_memory_than_its_process_has(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run")
    row = {"prompt": "Write add.", "answer": ["assert add(1, 2) == 3"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    tables["data"] = [{"name": "jsonl", "path": str(tmp_path / "rows.jsonl")}]
    tables["reward"] = [{"name": "code", "memory_mb": 8192, "sandbox": "weak"}]
    with pytest.raises(InputError, match=r"memory_mb = 8192 has no effect, its process may take 4096"):
        check(Settings.from_dict(tables))
    assert "reward dry-run" in check(Settings.from_dict(tables | {"scoring": {"worker_memory_mb": 8192}}))[0]


class Noted:
    """An engine, a reference and a trainer in one, noting what is called."""

    def __init__(self, fails: bool = False) -> None:
        self.called: list[str] = []
        self.stepped: list[Batch] = []
        self._fails = fails

    async def sleep(self) -> None:
        self.called.append("sleep")

    async def wake(self) -> None:
        self.called.append("wake")

    def logprobs(self, batch: Batch) -> torch.Tensor:
        self.called.append("reference")
        return torch.full_like(batch.advantages, -2.0)

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        self.called.append("step")
        self.stepped = list(batches)
        if self._fails:
            raise RuntimeError("out of memory")
        return UpdateResult(True, 1, {})


def test_a_step_has_the_references_logprobs_before_the_engine_sleeps_for_it() -> None:
    noted: Any = Noted()
    [batch] = pack([make_group((0.0, 1.0), advantages=(-1.0, 1.0))], max_tokens_per_batch=64, temperature=1.0)
    result = asyncio.run(train_step(noted, noted, noted, [batch]))
    assert result.updated
    assert noted.called == ["reference", "sleep", "step", "wake"]
    assert noted.stepped[0].reference_logprobs.tolist() == [-2.0] * len(batch.advantages)


def test_the_engine_wakes_after_a_step_that_failed() -> None:
    noted: Any = Noted(fails=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        asyncio.run(train_step(noted, None, noted, []))
    assert noted.called == ["sleep", "step", "wake"]


def test_without_a_separate_reference_and_with_an_engine_that_stays_awake_a_step_is_the_trainers_alone() -> None:
    noted: Any = Noted()
    asyncio.run(train_step(noted, None, None, []))
    assert noted.called == ["step"]
