"""How a run ends."""

import gc
import json
from pathlib import Path
from typing import Any, ClassVar

from podium.records import Group
from podium.run.start import Summary, train
from podium.settings.tables import Settings
from tests.conftest import small_tables


def even(group: Group) -> bool:
    return group.prompt.ordinal % 2 == 0


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def refilled_run(folder: Path, **run: Any) -> Summary:
    """Every second group is kept: 2 a step, out of 12 rows."""
    tables = small_tables(folder, prompts_per_step=2, rollouts_per_prompt=2, **run)
    tables["data"] = [{"name": "arithmetic", "max_rows": 12}]
    tables["filter"] = {"refill": True, "accept": "tests.test_run:even"}
    tables["eval"] = {"data": [{"name": "arithmetic", "split": "held_out", "max_rows": 4}]}
    return train(Settings.from_dict(tables))


def test_a_run_whose_data_ends_before_its_steps_is_finished_and_says_why(tmp_path: Path) -> None:
    summary = refilled_run(tmp_path / "run", steps=99, epochs=1)
    # 12 prompts could make 6 steps; the six even ones make 3, and the last prompt, an odd one, a step without an update
    assert (summary.state, summary.exit_code) == ("finished", 0)
    assert (summary.step, summary.steps, summary.skipped_steps) == (4, 6, 1)
    assert summary.message == "run.epochs = 1 is reached"
    assert summary.model is not None
    assert summary.accuracy_after is not None
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["step"], status["percent"]) == ("finished", 4, 100.0)
    assert status["message"] == summary.message
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines if line.get("eval")] == [0, 4]
    assert [line["batch/drawn"] for line in lines if not line.get("eval")] == [3, 4, 4, 1]


class FrozenObjects:
    """A report that counts what the garbage collector leaves alone."""

    counted: ClassVar[list[int]] = []

    def start(self, card: Any, history: Any) -> None:
        self.counted.append(gc.get_freeze_count())

    def write(self, report: Any) -> None:
        self.counted.append(gc.get_freeze_count())

    def evaluated(self, report: Any) -> None: ...

    def finish(self, summary: Any) -> None:
        self.counted.append(gc.get_freeze_count())

    def fail(self) -> None: ...


def frozen_objects(folder: Path) -> list[int]:
    """When the run starts, at its two steps, and when it has ended."""
    FrozenObjects.counted.clear()
    tables = small_tables(folder, steps=2)
    train(Settings.from_dict({**tables, "report": [{"name": "tests.test_run:FrozenObjects"}]}))
    return FrozenObjects.counted


def test_the_collector_leaves_alone_what_was_there_before_the_loop(tmp_path: Path) -> None:
    gc.unfreeze()  # tests/conftest.py has excluded it for all tests
    *in_the_loop, afterwards = frozen_objects(tmp_path / "run")
    gc.freeze()
    assert len(in_the_loop) == 3
    assert all(count > 100_000 for count in in_the_loop)
    assert afterwards == 0


def test_what_the_process_has_excluded_from_collection_stays_excluded(tmp_path: Path) -> None:
    assert gc.get_freeze_count() > 100_000
    assert min(frozen_objects(tmp_path / "run")) > 100_000


def test_a_run_that_made_all_its_steps_has_nothing_to_explain(tmp_path: Path) -> None:
    summary = refilled_run(tmp_path / "run", steps=2)
    assert (summary.state, summary.step, summary.steps, summary.message) == ("finished", 2, 2, "")


def test_solved_rows_are_not_drawn_again_and_a_run_without_rows_left_is_finished(tmp_path: Path) -> None:
    tables = small_tables(tmp_path / "run", steps=99)
    tables["data"] = [{"name": "arithmetic", "max_rows": 7}]
    tables["filter"] = {"retire_pass_rate": 0.5}
    summary = train(Settings.from_dict(tables))
    assert (summary.state, summary.exit_code) == ("finished", 0)
    assert 1 < summary.step < 99
    assert summary.message == "every row was solved at filter.retire_pass_rate = 0.5 and is retired"
    assert json.loads((tmp_path / "run" / "status.json").read_text())["message"] == summary.message
    retired = []
    for line, rows in zip(lines_of(tmp_path / "run"), solved_rows(tmp_path / "run"), strict=True):
        drawn, solved = rows
        assert not drawn & set(retired)
        retired += solved
        assert line["batch/retired"] == len(retired)
    assert len(retired) == 7


def solved_rows(folder: Path) -> list[tuple[set[str], set[str]]]:
    """The questions of each step, and those of which at least two of four answers were correct."""
    steps = []
    for path in sorted((folder / "rollouts").iterdir()):
        rollouts = [json.loads(line) for line in path.read_text().splitlines()]
        counts = {line["ordinal"]: 0 for line in rollouts}
        questions = {line["ordinal"]: line["prompt"] for line in rollouts}
        for line in rollouts:
            counts[line["ordinal"]] += line["correct"]
        solved = {questions[ordinal] for ordinal, count in counts.items() if count >= 2}
        steps.append((set(questions.values()), solved))
    return steps
