import json
import os
from pathlib import Path

from podium.report.page import page_data
from podium.report.web.reader import MAX_MOMENTS, MAX_POINTS, RECENT_STEPS, GrowingFile, RunReader
from podium.run.folder import Ledger, RunFolder
from tests.report.runs import add_step, make_run, step_numbers


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = GrowingFile(path)
    assert file.new_lines() == ([], False)
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert file.new_lines() == ([{"a": 1}, {"a": 2}], False)
    assert file.new_lines() == ([], False)
    with path.open("a") as more:
        more.write(": 3}\n")
    assert file.new_lines() == ([{"a": 3}], False)


def test_a_file_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    file = GrowingFile(path)
    file.new_lines()
    os.truncate(path, 9)
    assert file.new_lines() == ([{"a": 1}], True)
    path.write_text('{"a": 9}\n{"a": 8}\n{"a": 7}\n')  # as long as before, or longer, and other
    assert file.new_lines() == ([{"a": 9}, {"a": 8}, {"a": 7}], True)


def test_a_line_that_a_kill_cut_off_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n{"a\n[1]\n{"a": 2}\n')
    assert GrowingFile(path).new_lines()[0] == [{"a": 1}, {"a": 2}]


def test_a_rewound_run_shows_what_stands_and_then_what_comes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=4, texts=["old"])
    reader = RunReader(folder)
    reader.refresh()
    assert page_data(reader)["series"]["steps"] == [1, 2, 3, 4]
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    os.truncate(folder.metrics, sum(map(len, lines[:3])))  # the evaluation at the start, and two steps
    add_step(Ledger(folder), 3, ["new"])
    reader.refresh()
    shown = page_data(reader)
    assert shown["series"]["steps"] == [1, 2, 3]
    assert [each["text"] for each in shown["rollouts"]] == ["old", "old", "new"]
    assert len(shown["evals"]) == 1


def test_a_run_that_nobody_holds_any_more_was_killed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", state="running")
    assert RunReader(folder).status()["state"] == "killed"
    folder.lock()
    assert RunReader(folder).status()["state"] == "running"
    folder.unlock()


def test_every_rollout_of_a_step_can_be_had_whole(tmp_path: Path) -> None:
    texts = [f"{number} " + "x" * 20_000 for number in range(20)]
    folder = make_run(tmp_path / "run", steps=1, texts=texts)
    found = RunReader(folder).step_rollouts(1)
    assert [each["text"] for each in found["rollouts"]] == texts
    assert found["rollouts"][0]["logprob_gaps"] == [
        0.0,
        0.25,
        -1.0,
    ]  # the trainer's −0.5, −0.25, −1.5 less the sampler's −0.5
    assert found["pieces"] == {2: "<2>", 8: "<8>", 24: "<24>", 25: "<25>"}
    assert RunReader(folder).step_rollouts(2) == {"rollouts": [], "pieces": {}}


def test_a_long_run_has_few_points_and_its_last_steps_in_full(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    lines = [{"step": step, **step_numbers(step)} for step in range(1, 1501)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = RunReader(folder)
    reader.refresh()
    shown = page_data(reader)
    # 1500 steps in at most 600 points: 3 steps each
    assert (shown["series"]["stride"], len(shown["series"]["steps"])) == (3, 500)
    assert len(shown["series"]["steps"]) <= MAX_POINTS
    assert [line["step"] for line in shown["recent"]] == list(range(1501 - RECENT_STEPS, 1501))


def test_every_metric_on_the_page_that_is_known_has_its_words(tmp_path: Path) -> None:
    reader = RunReader(make_run(tmp_path / "run"))
    reader.refresh()
    words = page_data(reader)["words"]
    assert words["reward/mean"][0].startswith("mean reward of all rollouts")
    assert "other/number_1" not in words


def test_events_of_every_step_are_kept_for_the_timeline_only(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    for number in range(400):
        folder.event("sampling", ordinals=[number, number + 1])
    folder.event("engine_replaced", engine=2)
    reader = RunReader(folder)
    reader.refresh()
    shown = page_data(reader)
    assert [event["event"] for event in shown["events"]] == ["started", "engine_replaced"]
    assert len(shown["moments"]) == MAX_MOMENTS
    assert {event["ordinals"] for event in shown["moments"]} == {2}  # how many, not which


def test_a_folder_without_settings_or_rollouts_still_makes_a_page(tmp_path: Path) -> None:
    reader = RunReader(RunFolder(tmp_path))
    reader.refresh()
    shown = page_data(reader)
    assert shown["card"]["facts"]["model"] is None
    assert shown["health"] == []
