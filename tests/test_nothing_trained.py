"""A run that trains nothing, or leaves rows out, says so: while it goes on, at its end and on its page."""

import json
from pathlib import Path
from typing import Any

import pytest

from podium.check.verdicts import _settings_notes
from podium.data.build import OrderedData, Source, left_out
from podium.model.load import load_policy
from podium.records import Plan, Row, StepGroups, UpdateResult
from podium.report.build import FIRST_WARNING, IdleSteps, is_zero_gradient, why_idle
from podium.run.folder import RunFolder
from podium.run.start import UNTRAINED, evaluate, resume, train
from podium.settings.sections import DataSource
from podium.settings.tables import Model, Settings
from tests.builders import make_group, make_rollout
from tests.commands import podium
from tests.fuzzed_settings import GOOD

SKIPPED = UpdateResult(updated=False, num_loss_tokens=0, metrics={})
CUT = tuple(make_rollout(sample_index=index, finish_reason="length") for index in range(2))


def a_step(*groups: Any, kept: tuple[Any, ...] = ()) -> StepGroups:
    return StepGroups(len(groups), drawn=groups, kept=kept)


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (a_step(make_group((0.0, 0.0))), "every reward is 0"),
        (a_step(make_group((0.5, 0.5)), make_group((0.5, 0.5))), "every reward is 0.5"),
        (a_step(make_group((0.0, 0.0)), make_group((1.0, 1.0))), "the rewards within each group are all equal"),
        (a_step(make_group((None, None))), "no rollout has a reward: every reward failed or abstained"),
        (a_step(make_group((None, 1.0))), "no group has two rollouts with a reward"),
        (a_step(make_group((), rollouts=())), "the engine failed on every prompt"),
        (a_step(make_group((0.0, 0.0), rollouts=CUT)), "every reward is 0; every answer was cut at rollout.max_new"),
        (a_step(make_group((0.0, 1.0), rollouts=CUT)), "every answer was cut at rollout.max_new_tokens, and filter"),
        (a_step(make_group((0.0, 1.0))), "filter.accept or filter.truncated dropped every group"),
    ],
)
def test_a_step_says_why_it_trained_nothing(step: StepGroups, reason: str) -> None:
    assert (why_idle(step, SKIPPED) or "").startswith(reason)


def test_a_gradient_that_is_not_finite_is_another_reason() -> None:
    step = a_step(make_group(), kept=(make_group(),))
    assert why_idle(step, UpdateResult(False, 6, {})) == "the loss or its gradient was not finite"
    assert why_idle(step, UpdateResult(True, 6, {"optim/grad_norm": 1e-30})) is None
    assert not is_zero_gradient({"optim/grad_norm": 0.0, "optim/skipped": 1.0})  # counted as skipped already
    assert (why_idle(step, UpdateResult(True, 6, {"optim/grad_norm": 0.0})) or "").startswith("the gradient is 0")


def test_the_warning_comes_after_a_few_steps_in_a_row_and_then_more_rarely() -> None:
    """At 3, 6, 12, 24; an update begins the count again."""
    idle = IdleSteps()
    warned = [number for number in range(1, 31) if idle.seen("every reward is 0")]
    assert warned == [FIRST_WARNING, 6, 12, 24]
    assert idle.seen(None) is None
    assert [bool(idle.seen("x")) for _ in range(3)] == [False, False, True]
    assert idle.reasons == "every reward is 0 (30×), x (3×)"


def settings(folder: Path, **tables: Any) -> Settings:
    run = {**GOOD["run"], "steps": 4, "folder": str(folder)}
    return Settings.from_dict({**GOOD, "run": run, "report": [{"name": "console"}, {"name": "page"}], **tables})


ZERO = "import podium\n\n\n@podium.runs_inline\ndef zero(prompt, rollout):\n    return 0.0\n"


def test_a_run_without_an_update_says_that_nothing_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("zero.py").write_text(ZERO)
    summary = train(settings(tmp_path / "run", reward=[{"name": "./zero.py:zero"}]))
    assert (summary.state, summary.exit_code) == ("finished", UNTRAINED)
    assert summary.untrained == "every reward is 0; every answer was cut at rollout.max_new_tokens"
    told = capfd.readouterr()
    assert "NOTHING WAS TRAINED: none of the 4 steps changed the policy; every reward is 0" in told.out
    assert "trained model" not in told.out
    assert "warning: 3 steps in a row trained nothing: every reward is 0" in told.err
    folder = RunFolder(tmp_path / "run")
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "nothing_trained"] == [3]
    assert "nothing was trained: every reward is 0" in (tmp_path / "run" / "status.json").read_text()
    assert "Nothing was trained" in folder.page.read_text()


def test_a_run_that_trains_ends_with_0_and_does_not_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given = settings(tmp_path / "run", rollout={"max_new_tokens": 24})
    run = given.run.model_copy(update={"prompts_per_step": 8, "rollouts_per_prompt": 4, "steps": 2})
    summary = train(given.model_copy(update={"run": run}))
    assert (summary.exit_code, summary.untrained) == (0, "")
    told = capfd.readouterr()
    assert "NOTHING" not in told.out + told.err
    assert "trained model" in told.out


NO_LOSS = """
from dataclasses import replace

from podium.loss.grpo import grpo


def loss(policy, old, batch):
    made = grpo(policy, old, batch)
    return replace(made, per_token=made.per_token * 0)
"""


def test_updates_by_a_gradient_of_0_train_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.py").write_text(NO_LOSS)
    given = settings(tmp_path / "run", rollout={"max_new_tokens": 24}, loss={"name": f"{tmp_path}/none.py:loss"})
    run = given.run.model_copy(update={"prompts_per_step": 8, "rollouts_per_prompt": 4, "steps": 3})
    summary = train(given.model_copy(update={"run": run}))
    assert (summary.exit_code, summary.skipped_steps) == (UNTRAINED, 0)
    assert summary.untrained.startswith("the gradient is 0")
    told = capfd.readouterr()
    assert "NOTHING WAS TRAINED: none of the 3 steps changed the policy; the gradient is 0" in told.out
    assert "warning: 3 steps in a row trained nothing: the gradient is 0" in told.err
    assert "Nothing was trained" in RunFolder(tmp_path / "run").page.read_text()


@pytest.mark.parametrize(("warmup", "is_noted"), [(3, False), (4, True), (100, True)])
def test_check_notes_a_run_that_is_all_warm_up(warmup: int, is_noted: bool, tmp_path: Path) -> None:
    notes = _settings_notes(settings(tmp_path, trainer={"warmup_steps": warmup}).resolve(), "cpu")
    assert any(f"trainer.warmup_steps = {warmup} and run.steps = 4" in note for note in notes) is is_noted


def rows(path: Path) -> None:
    """Prompts of 10 and of 400 characters, which are the embedded model's tokens; each third is long."""
    lines = [{"question": "1 + 2 = ?" + " " * (390 * (k % 3 == 0)), "answer": "3"} for k in range(9)]
    path.write_text("\n".join(map(json.dumps, lines)))


def test_rows_that_are_too_long_are_told_by_train_resume_and_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows(Path("rows.jsonl"))
    table = {"name": "jsonl", "path": "rows.jsonl", "max_prompt_tokens": 100}
    given = settings(tmp_path / "run", data=[table], eval={"data": [table]})
    train(given)
    expected = "data[0] (jsonl): 3 of 9 rows are left out, their prompts have more than 100 tokens (up to "
    told = capfd.readouterr().err
    assert [line.removeprefix("eval.").startswith(expected) for line in told.splitlines() if "left out" in line] == [
        True,
        True,
    ]
    assert "to use them, raise max_prompt_tokens of that table" in told
    assert "Rows are left out" in RunFolder(tmp_path / "run").page.read_text()
    resume(
        given.model_copy(update={"run": given.run.model_copy(update={"steps": 5})}), RunFolder.open(tmp_path / "run")
    )
    assert expected in capfd.readouterr().err
    evaluate(given)
    assert f"eval.{expected}" in capfd.readouterr().err


def test_each_source_is_told_with_its_own_limit() -> None:
    policy = load_policy(Model.model_validate({"device": "cpu"}), seed=0)
    some = [Row.from_text("x" * length) for length in (5, 50)]
    sources = [Source(DataSource(name=name, max_prompt_tokens=limit), some) for name, limit in (("a", 20), ("b", 70))]
    data = OrderedData(sources, policy.tokenizer, Plan(1, 1, 2), 0, fits=100)
    [note] = left_out(data, "data")
    assert note.startswith("data[0] (a): 1 of 2 rows are left out, their prompts have more than 20 tokens")


def test_the_command_ends_with_3(tmp_path: Path) -> None:
    (tmp_path / "zero.py").write_text(ZERO)
    file = tmp_path / "settings.toml"
    file.write_text(settings(tmp_path / "run", reward=[{"name": f"{tmp_path}/zero.py:zero"}]).to_toml())
    done = podium("train", str(file), "--quiet", folder=tmp_path)
    assert done.returncode == 3
    assert "NOTHING WAS TRAINED" in done.stdout
