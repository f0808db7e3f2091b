"""The command line as a user meets it: what goes wrong is told in one message, and nothing is written."""

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from podium import cli
from podium.settings.lookup import STAGES
from podium.settings.sections import SECTIONS
from tests import commands

SETTINGS = """
[run]
folder = "run"
steps = 1
prompts_per_step = 2
rollouts_per_prompt = 2
[model]
device = "cpu"
[rollout]
max_new_tokens = 24
[[data]]
name = "arithmetic"
max_rows = 8
[[reward]]
name = "arithmetic"
"""

HELD_OUT = """
[eval]
[[eval.data]]
split = "held_out"
max_rows = 2
"""

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that spin for each other make a tiny model slower, the more so on a machine with other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with good settings in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.toml").write_text(SETTINGS)
    return tmp_path


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step that is done; copy it before changing it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "settings.toml").write_text(SETTINGS + HELD_OUT)
    assert cli.main(["train", f"{folder}/settings.toml", f"--run.folder={folder}/run", "--quiet"]) == 0
    return folder / "run"


def snapshot(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below, with what is in it; but for what Python keeps of a user's own code."""
    found = [path for path in folder.rglob("*") if "__pycache__" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in found}


def refused(here: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one message of a command that must be refused with exit code 2 and leave everything as it was."""
    before = snapshot(here)
    assert cli.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("podium: ")
    assert "Traceback" not in err
    assert snapshot(here) == before
    return err.removeprefix("podium: ").rstrip("\n")


def run_command(*arguments: str, folder: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "podium.cli", *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)


BROKEN_SETTINGS = {
    "unknown section": (
        SETTINGS + "[training]\nlr = 1\n",
        r"training is not a setting; valid here: advantage, .*trainer",
    ),
    "unknown key": (SETTINGS.replace("steps =", "stepz ="), r"run\.stepz is not a setting; valid here: .*, steps, .*"),
    "wrong type": (
        SETTINGS.replace("steps = 1", "steps = 'many'"),
        r"run\.steps = 'many': input should be a valid integer.*",
    ),
    "invalid TOML": ("[run\n", r"broken\.toml is not valid TOML: .*line 1.*"),
    "group of one": (
        SETTINGS.replace("rollouts_per_prompt = 2", "rollouts_per_prompt = 1"),
        r"run\.rollouts_per_prompt = 1: a group of one has no baseline; give 2 or more",
    ),
    "unknown loss": (
        SETTINGS + "[loss]\nname = 'gpro'\n",
        r"loss\.name = 'gpro' is not known; did you mean 'g[rs]po'\? Valid: .*grpo.*",
    ),
    "unknown option": (SETTINGS + "[loss]\nclipp = 1\n", r"loss\.clipp is not an option of grpo; .*Valid: .*clip.*"),
    "no reward": (
        SETTINGS.replace('[[reward]]\nname = "arithmetic"', ""),
        r"no reward: add a \[\[reward\]\] table, or .*",
    ),
    "reward twice": (
        SETTINGS + "[[reward]]\nname = 'arithmetic'\n",
        r"reward: 'arithmetic' is given twice; give each reward one table",
    ),
    "eval.every alone": (
        SETTINGS + "[eval]\nevery = 5\n",
        r"eval\.every has no effect without .*; add one or remove it",
    ),
    "bfloat16 and full weights": (
        SETTINGS.replace("[model]", "[model]\ndtype = 'bfloat16'\nlora = false"),
        r"model\.dtype = 'bfloat16' with model\.lora = false: .*; train full weights in float32, or set .*",
    ),
    "no data table": (
        "data = []\n" + SETTINGS.replace("[[data]]", "[pack]").replace('name = "arithmetic"\nmax_rows = 8', ""),
        r"data: at least one \[\[data\]\] table is needed",
    ),
    "unknown model folder": (
        SETTINGS.replace("[model]", "[model]\nname = './nothing'"),
        r"model\.name = '\./nothing': no such folder",
    ),
    "no room for a prompt": (
        SETTINGS.replace("= 24", "= 512"),
        r"rollout\.max_new_tokens = 512 leaves no room for a prompt in a context of 512",
    ),
    "no prompt that fits": (
        SETTINGS.replace("= 24", "= 500"),
        r"data: none of the 8 prompts fits: the shortest has 18 tokens and 12 are allowed; raise .* or lower .*",
    ),
    "no prompt within the limit": (
        SETTINGS.replace("max_rows = 8", "max_rows = 8\nmax_prompt_tokens = 17"),
        r"data: none of the 8 prompts fits: the shortest has 18 tokens and 17 are allowed; raise .*",
    ),
    "stop text of two tokens": (
        SETTINGS.replace("= 24", "= 24\nstop = ['#', 'ab']"),
        r"rollout\.stop: 'ab' is 2 tokens of this model; give texts of one token each",
    ),
    "unknown layers for LoRA": (
        SETTINGS.replace("[rollout]", "[model.lora]\ntargets = ['no_proj']\n[rollout]"),
        r"model\.lora\.targets = \['no_proj'\]: .*",
    ),
    "held-out file that is not there": (
        SETTINGS + "[[eval.data]]\nname = 'jsonl'\npath = 'none.jsonl'\n",
        r"data\.path = 'none\.jsonl': no such file",
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_SETTINGS.values(), ids=BROKEN_SETTINGS)
def test_broken_settings_are_told_before_anything_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (here / "broken.toml").write_text(text)
    assert re.fullmatch(message, refused(here, capsys, "train", "broken.toml"))


BROKEN_ROWS = {
    "no JSON": (
        '{"prompt": "a", "answer": "1"}\nnot json\n',
        r".*has 1 bad row; fix or remove it:\n  row 2: Expecting value.*",
    ),
    "several": (
        '{"prompt": 1}\n\n{"messages": []}\n',
        r".*has 2 bad rows; fix or remove them:\n  row 1: .*\n  row 3: .*",
    ),
    "empty file": ("\n\n", r"data: the sources hold no rows; give a file or a split that has some"),
    "unknown reward": (
        '{"prompt": "a", "reward": "nope"}\n',
        r"row 1 of jsonl: reward 'nope' is not known; known: answer_tag, arithmetic, .*exact.*",
    ),
    "answers that their rewards cannot use": (
        '{"prompt": "a", "answer": "85"}\n{"prompt": "b", "answer": "many"}\n'
        '{"prompt": "c", "reward": ["exact", "gsm8k"], "answer": "many"}\n'
        '{"prompt": "d", "reward": "ifeval", "answer": {"func_name": "verify_nothing"}}\n',
        r"3 answers cannot be used; mend or remove the rows:\n"
        r"  row 2 of jsonl, reward 'arithmetic': the answer must hold one integer, not 'many'\n"
        r"  row 3 of jsonl, reward 'gsm8k': no number in the answer 'many'; .*\n"
        r"  row 4 of jsonl, reward 'ifeval': 'verify_nothing' is not known; known: verify_keywords, .*",
    ),
    "many answers that cannot be used": (
        '{"prompt": "a", "answer": "none"}\n' * 23,
        r"23 answers cannot be used; mend or remove the rows:\n(  row .*\n){20}  and 3 more",
    ),
    "reward that no row uses": (
        '{"prompt": "a", "reward": "exact"}\n',
        r"reward 'arithmetic' has no effect: every row names its own reward; remove one or the other",
    ),
}


@pytest.mark.parametrize(("rows", "message"), BROKEN_ROWS.values(), ids=BROKEN_ROWS)
def test_broken_data_is_told_before_anything_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], rows: str, message: str
) -> None:
    (here / "rows.jsonl").write_text(rows)
    (here / "data.toml").write_text(
        SETTINGS.replace('name = "arithmetic"\nmax_rows = 8', 'name = "jsonl"\npath = "rows.jsonl"')
    )
    assert re.fullmatch(message, refused(here, capsys, "train", "data.toml"))


BROKEN_COMMANDS = {
    "missing settings file": (("train", "none.toml"), "no settings file none.toml"),
    "a folder for settings": (("train", "."), r"\. is a folder, not a settings file"),
    "an override without a value": (
        ("train", "good.toml", "--run.steps"),
        r"'--run\.steps' is not an override; write --section\.key=value",
    ),
    "an override without dashes": (
        ("train", "good.toml", "run.steps=1"),
        r"'run\.steps=1' is not an override; write .*",
    ),
    "an override without a section": (("train", "good.toml", "--steps=1"), r"'--steps=1' is not an override; write .*"),
    "an override of an unknown key": (
        ("train", "good.toml", "--run.step=1"),
        r"run\.step is not a setting; valid here: .*",
    ),
    "a run folder that is a file": (
        ("train", "good.toml", "--run.folder=good.toml"),
        r"run\.folder = 'good\.toml' is a file; give a new folder",
    ),
    "a run folder below a file": (
        ("train", "good.toml", "--run.folder=good.toml/run"),
        r"run\.folder = 'good\.toml/run' cannot be made: Not a directory",
    ),
    "resume where nothing is": (("resume", "none"), r"none is not a run folder: it has no settings\.toml"),
    "resume where no run is": (("resume", "."), r"\. is not a run folder: it has no settings\.toml"),
    "eval of a model without settings": (("eval", "embedded"), r"embedded is not a run folder; add a settings file .*"),
    "eval without held-out data": (
        ("eval", "embedded", "good.toml"),
        r"nothing to evaluate on: add an \[\[eval\.data\]\] table",
    ),
    "an unknown stage": (("list", "losses"), "'losses' is not a section; sections: run, model, .*"),
    "list with an override": (("list", "loss", "--a.b=1"), r"podium list takes no --a\.b=1"),
    "check of broken settings": (("check", "good.toml", "--loss.clipp=1"), r"loss\.clipp is not an option of grpo; .*"),
    "show of broken settings": (("show", "good.toml", "--loss.clipp=1"), r"loss\.clipp is not an option of grpo; .*"),
}


@pytest.mark.parametrize(("arguments", "message"), BROKEN_COMMANDS.values(), ids=BROKEN_COMMANDS)
def test_a_broken_command_is_told_before_anything_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert re.fullmatch(message, refused(here, capsys, *arguments))


def test_a_data_file_that_is_not_there_is_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "data.toml").write_text(
        SETTINGS.replace('"arithmetic"\nmax_rows', '"jsonl"\npath = "none.jsonl"\nmax_rows')
    )
    assert refused(here, capsys, "train", "data.toml") == "data.path = 'none.jsonl': no such file"


def test_a_finished_run_is_not_overwritten(here: Path, capsys: pytest.CaptureFixture[str], finished_run: Path) -> None:
    shutil.copytree(finished_run, here / "run")
    message = refused(here, capsys, "train", "good.toml")
    assert message == (
        "run.folder = 'run' holds a finished run; give a new folder, or `podium resume` it with more run.steps"
    )


def test_a_run_that_has_begun_is_not_overwritten(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    (here / "run" / "settings.toml").write_text(SETTINGS)
    (here / "run" / "status.json").write_text('{"state": "stopped"}')
    message = refused(here, capsys, "train", "good.toml")
    assert message == (
        "run.folder = 'run' holds a run that has started; continue it with `podium resume`, or give a new folder"
    )


def test_a_folder_with_other_things_in_it_is_left_alone(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    (here / "run" / "thesis.txt").write_text("precious")
    assert refused(here, capsys, "train", "good.toml") == "run.folder = 'run' is not empty; give a new folder"


HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "a+")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write("process 7 on elsewhere")
lock.flush()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_in_use(here: Path) -> Iterator[Path]:
    """A run folder whose lock another process holds."""
    (here / "run").mkdir()
    (here / "run" / "settings.toml").write_text(SETTINGS)
    command = [sys.executable, "-c", HOLD, str(here / "run" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        yield here / "run"
        holder.stdin.close()


def test_a_run_that_was_killed_before_its_first_commit_says_that_it_begins_again(
    here: Path, capsys: pytest.CaptureFixture[str], finished_run: Path
) -> None:
    (here / "run").mkdir()
    shutil.copy(finished_run / "settings.toml", here / "run")
    assert cli.main(["resume", "run", "--quiet"]) == 0
    assert "run has no checkpoint yet: the run starts again at step 0" in capsys.readouterr().err
    assert cli.main(["resume", "run", "--run.steps=2", "--quiet"]) == 0
    assert "starts again" not in capsys.readouterr().err


def test_a_run_in_use_is_refused(here: Path, capsys: pytest.CaptureFixture[str], run_in_use: Path) -> None:
    message = refused(here, capsys, "train", "good.toml")
    assert message == "run.folder = 'run' is in use by another run; wait for it, stop it, or give a new folder"
    message = refused(here, capsys, "resume", "run")
    assert message == "run is in use by process 7 on elsewhere; wait for it, stop it, or give another folder"


def test_a_setting_that_would_make_it_another_run_cannot_change_on_resume(
    here: Path, capsys: pytest.CaptureFixture[str], finished_run: Path
) -> None:
    shutil.copytree(finished_run, here / "run")
    message = refused(here, capsys, "resume", "run", "--run.steps=2", "--loss.clip=0.1")
    assert message.startswith("loss.clip cannot change on resume: the run would no longer be the same one. Free: ")
    assert message.endswith("to insist, add --allow-change loss.clip")
    assert "is not a setting" in refused(here, capsys, "resume", "run", "--run.steps_more=2")


def test_a_length_that_the_learning_rate_decays_over_cannot_change_in_silence(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "good.toml", "--quiet", "--run.steps=1", "--trainer.schedule=linear"]) == 0
    capsys.readouterr()
    message = refused(here, capsys, "resume", "run", "--run.steps=2")
    assert message.startswith(
        "run.steps changes from 1 to 2 and trainer.schedule = 'linear' decays over the run's length"
    )
    assert "after step 1 from 0 to " in message
    assert cli.main(["resume", "run", "--quiet", "--run.steps=2", "--allow-change", "run.steps"]) == 0
    assert "warning: run.steps changes from 1 to 2 and trainer.schedule = 'linear'" in capsys.readouterr().err


def test_a_setting_that_was_edited_by_hand_is_warned_of(
    here: Path, capsys: pytest.CaptureFixture[str], finished_run: Path
) -> None:
    shutil.copytree(finished_run, here / "run")
    text = (here / "run" / "settings.toml").read_text()
    lr = tomllib.loads(text)["trainer"]["lr"]
    (here / "run" / "settings.toml").write_text(re.sub(r"(?m)^lr = .*$", "lr = 0.00123", text))
    assert cli.main(["resume", "run", "--run.steps=2", "--quiet"]) == 0
    assert f"warning: trainer.lr changes from {lr!r} to 0.00123" in capsys.readouterr().err


def test_a_resume_that_is_refused_leaves_the_run_as_it_was_and_its_lock_free(
    here: Path, capsys: pytest.CaptureFixture[str], finished_run: Path
) -> None:
    shutil.copytree(finished_run, here / "run")
    message = refused(here, capsys, "resume", "run", "--run.steps=2", "--eval.data.max_prompt_tokens=3")
    assert message.startswith("data: none of the 2 prompts fits: ")
    assert cli.main(["resume", "run", "--run.steps=2", "--quiet"]) == 0


def test_a_resume_from_a_checkpoint_that_is_not_there_leaves_the_run_as_it_was(
    here: Path, capsys: pytest.CaptureFixture[str], finished_run: Path
) -> None:
    shutil.copytree(finished_run, here / "run")
    message = refused(here, capsys, "resume", "run", "--run.steps=2", "--step=7")
    assert message == "no checkpoint of step 7; there are: 1"


def test_check_refuses_what_train_would_refuse(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "broken.toml").write_text(SETTINGS + "[[eval.data]]\nname = 'jsonl'\npath = 'none.jsonl'\n")
    assert refused(here, capsys, "check", "broken.toml") == "data.path = 'none.jsonl': no such file"


@pytest.mark.parametrize("command", ["train", "check"])
def test_held_out_answers_are_checked_too(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "What is 10 + 38?", "answer": "48"}\n{"prompt": "And so?"}\n')
    (here / "eval.toml").write_text(SETTINGS + "[[eval.data]]\nname = 'jsonl'\npath = 'rows.jsonl'\n")
    assert refused(here, capsys, command, "eval.toml") == (
        "1 answers cannot be used; mend or remove the rows:\n"
        "  row 2 of jsonl, reward 'arithmetic': the answer must be a text or a number, not None"
    )


def test_a_reward_of_ones_own_may_check_answers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine.py").write_text(
        "import podium\n\n\n"
        "def check(row):\n    if int(row.answer) > 50:\n        raise ValueError('too large')\n\n\n"
        "@podium.checks_answer(check)\n"
        "def mine(prompt, rollout, *, scale: float = 1.0):\n    return scale\n"
    )
    (here / "rows.jsonl").write_text('{"prompt": "a", "answer": "48"}\n{"prompt": "b", "answer": "85"}\n')
    settings = SETTINGS.replace('name = "arithmetic"\nmax_rows', 'name = "jsonl"\npath = "rows.jsonl"\nmax_rows')
    (here / "own.toml").write_text(
        settings.replace('[[reward]]\nname = "arithmetic"', "[[reward]]\nname = 'mine.py:mine'")
    )
    assert refused(here, capsys, "train", "own.toml").endswith("  row 2 of jsonl, reward 'mine.py:mine': too large")


def test_a_run_whose_held_out_rows_name_their_own_reward_can_be_evaluated(here: Path) -> None:
    (here / "rows.jsonl").write_text('{"prompt": "What is 10 + 38?", "answer": "48", "reward": "exact"}\n')
    (here / "eval.toml").write_text(SETTINGS + "[[eval.data]]\nname = 'jsonl'\npath = 'rows.jsonl'\n")
    assert cli.main(["train", "eval.toml", "--quiet"]) == 0
    assert cli.main(["eval", "run"]) == 0


def test_a_broken_command_exits_with_2_and_no_traceback(here: Path) -> None:
    done = run_command("train", "good.toml", "--run.stepz=3", folder=here)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("podium: run.stepz is not a setting; valid here: ")
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in here.iterdir()] == ["good.toml"]


def test_a_reward_that_breaks_its_contract_ends_the_run_with_one_message(here: Path) -> None:
    (here / "mine.py").write_text("def lies(prompt, rollout):\n    return 'high'\n")
    (here / "lies.toml").write_text(
        SETTINGS.replace('[[reward]]\nname = "arithmetic"', '[[reward]]\nname = "mine:lies"')
    )
    done = commands.podium("train", "lies.toml", "--quiet", folder=here)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1, done.stderr
    (message,) = done.stderr.splitlines()
    assert re.fullmatch(
        r"podium: reward 'mine:lies' on prompt \d \(arithmetic\) returned 'high' of type str; .*", message
    )
    assert json.loads((here / "run" / "status.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("arguments", [[], ["trian", "x.toml"], ["train"], ["train", "a.toml", "--json=3"]])
def test_a_command_that_is_none_shows_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: podium")


def test_the_help_loads_nothing_heavy(tmp_path: Path) -> None:
    """So it comes at once: under half a second where nothing else runs."""
    done = run_command("--help", folder=tmp_path)
    assert done.returncode == 0
    for command in ("train", "resume", "eval", "check", "show", "list"):
        assert f"\n    {command} " in done.stdout
    heavy = "{'torch', 'transformers', 'pydantic', 'numpy', 'rich', 'httpx'}"
    code = f"import sys\nfrom podium.cli import _parser\n_parser().format_help()\nprint({heavy} & sys.modules.keys())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.strip() == "set()"


@pytest.mark.parametrize("code", ["import podium", "import podium, podium.cli; podium.cli._parser().format_help()"])
def test_nothing_heavy_is_imported_before_it_is_needed(code: str) -> None:
    code += "; import sys; print({'torch', 'transformers', 'pydantic', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "set()"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == "podium 0.1.0\n"


def test_list_shows_every_stage_with_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads == list(dict.fromkeys([*SECTIONS, *STAGES]))
    assert "  steps = 100   Number of trainer steps." in lines
    assert "  jsonl          Data from a JSON Lines file or URL: one object per line." in lines
    assert "      path = required   file, or http:// or https:// URL" in lines


def test_list_of_one_stage_shows_its_options_with_defaults_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "loss"]) == 0
    stage, *lines = capsys.readouterr().out.splitlines()
    assert stage == "loss"
    assert "  grpo           GRPO's clipped policy-gradient loss." in lines
    assert any(line.startswith("      clip = (0.2, 0.2)   ratios outside [1 - low, 1 + high]") for line in lines)


def test_show_prints_the_settings_resolved(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(here)
    assert cli.main(["show", "good.toml", "--trainer.lr=0.25", "--model.lora=false"]) == 0
    as_toml = tomllib.loads(capsys.readouterr().out)
    assert as_toml["trainer"]["lr"] == 0.25
    assert as_toml["model"]["lora"] is False
    assert as_toml["loss"]["clip"] == [0.2, 0.2]
    assert cli.main(["show", "good.toml", "--trainer.lr=0.25", "--model.lora=false", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == as_toml
    assert snapshot(here) == before


def test_what_show_prints_is_a_settings_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["show", "good.toml"])
    shown = capsys.readouterr().out
    (here / "shown.toml").write_text(shown)
    cli.main(["show", "shown.toml"])
    assert capsys.readouterr().out == shown


def test_check_shows_data_rewards_and_memory_and_writes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(here)
    assert cli.main(["check", "good.toml"]) == 0
    out = capsys.readouterr().out
    for part in ("settings", "data", "reward dry-run", "memory", "time"):
        assert re.search(rf"^{part}: (ok|note)$", out, re.MULTILINE)
    assert re.search(
        r"data\[0\] arithmetic +15692 +8 +15684 beyond max_rows +8 +18 to 18, median 18 +the settings'", out
    )
    assert "data[0] row 1: '<s>What is 10 + 10?\\n' → '20'" in out
    assert len(re.findall(r"^    reward [\d.]+  advantage [+-][\d.]+  '", out, re.MULTILINE)) == 4  # 2 prompts × 2
    assert out.endswith("ok: `podium train` would start\n")
    assert snapshot(here) == before


def test_check_of_a_reward_that_raises_tells_everything_else_too(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.py").write_text("def raises(prompt, rollout) -> float:\n    return [][0]\n")
    settings = (here / "good.toml").read_text()
    (here / "bad.toml").write_text(re.sub(r'(\[\[reward\]\]\s+name = )"[^"]*"', r'\1"bad.py:raises"', settings))
    assert cli.main(["check", "bad.toml"]) == 2
    out = capsys.readouterr().out
    assert re.search(r"^reward dry-run: problem$", out, re.MULTILINE)
    assert "failed: bad.py:raises: IndexError at bad.py:2: list index out of range (×2)" in out
    assert "problem: 4 of 4 reward calls gave no number, more than scoring.max_failed_share = 0.1" in out
    assert re.search(r"^time: (ok|note)$", out, re.MULTILINE)
    assert out.endswith("1 to fix before `podium train`\n")


def test_check_notes_that_a_step_is_larger_than_the_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "good.toml", "--run.prompts_per_step=9"]) == 0
    note = "note: a step draws 9 prompts and a pass has 8: the same prompt occurs twice in a step"
    assert note in capsys.readouterr().out
    assert cli.main(["check", "good.toml", "--run.prompts_per_step=8"]) == 0
    assert "comes twice" not in capsys.readouterr().out


def test_train_with_json_prints_a_json_object_a_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "eval.toml").write_text(SETTINGS + HELD_OUT)
    assert cli.main(["train", "eval.toml", "--run.steps=2", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert [line["event"] for line in lines] == ["start", "eval", "step", "step", "eval", "finish"]
    assert [line["step"] for line in lines[1:]] == [0, 1, 2, 2, 2]
    assert lines[-1]["state"] == "finished"
    saved = [json.loads(line) for line in (here / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in saved] == [0, 1, 2, 2]
    assert lines[2]["reward/mean"] == pytest.approx(saved[1]["reward/mean"], abs=1e-8)
    assert json.loads((here / "run" / "status.json").read_text())["state"] == "finished"


def test_train_with_quiet_prints_the_summary_only(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "good.toml", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert re.match(r"finished: step 1 of 1 in [\d.]+ s\n", out)
    assert "run folder: run\npage: run/report.html (live: podium report run)\ntrained model: run/final\n" in out
    assert "quiet" not in (here / "run" / "settings.toml").read_text()  # it was for this call only


def test_report_serves_the_run_until_it_is_interrupted(here: Path) -> None:
    assert cli.main(["train", "good.toml", "--quiet"]) == 0
    command = [sys.executable, "-m", "podium.cli", "report", "run", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            with urllib.request.urlopen(address, timeout=60) as answer:
                assert b"grpo on embedded" in answer.read()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "nothing is not a folder; give a run folder, or a folder of runs"),
        (["."], ". is not a run folder and contains none"),
        ([".", "--run.steps=3"], "podium report takes no --run.steps=3"),
    ],
)
def test_report_refuses_what_it_cannot_show(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["report", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_report_refuses_what_is_no_port(here: Path, port: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["report", "run", f"--port={port}"])


def test_train_without_a_folder_makes_one_below_runs(here: Path) -> None:
    (here / "free.toml").write_text(SETTINGS.replace('folder = "run"\n', ""))
    assert cli.main(["train", "free.toml", "--quiet"]) == 0
    (folder,) = (here / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}", folder.name)
    assert (folder / "final" / "adapter_model.safetensors").is_file()


def test_the_lock_is_free_once_a_run_has_ended(finished_run: Path) -> None:
    with (finished_run / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_resume_of_a_finished_run_says_so(here: Path, capsys: pytest.CaptureFixture[str], finished_run: Path) -> None:
    shutil.copytree(finished_run, here / "run")
    before = snapshot(here)
    assert cli.main(["resume", "run"]) == 0
    assert capsys.readouterr().out == "run is finished; nothing to do. For more: podium resume run --run.steps=N\n"
    assert snapshot(here) == before


def test_resume_with_more_steps_goes_on(here: Path, capsys: pytest.CaptureFixture[str], finished_run: Path) -> None:
    shutil.copytree(finished_run, here / "run")
    assert cli.main(["resume", "run", "--run.steps=2", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("finished: step 2 of 2")
    assert tomllib.loads((here / "run" / "settings.toml").read_text())["run"]["steps"] == 2


def test_resume_takes_another_setting_if_one_insists(here: Path, finished_run: Path) -> None:
    shutil.copytree(finished_run, here / "run")
    insisting = ["--loss.clip=0.1", "--allow-change", "loss.clip"]
    assert cli.main(["resume", "run", "--run.steps=2", "--quiet", *insisting]) == 0
    assert tomllib.loads((here / "run" / "settings.toml").read_text())["loss"]["clip"] == 0.1


def metrics_of(out: str) -> dict[str, float]:
    """The table of numbers at the top, and the line below it."""
    lines = [line.split() for line in out.partition("\n\n")[0].splitlines()[1:]]
    return {f"eval/{words[0]}": float(words[1]) for words in lines[:-1]} | {"eval/prompts": float(lines[-1][0])}


def test_eval_of_a_run_is_its_held_out_accuracy(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(finished_run)
    assert cli.main(["eval", str(finished_run), "--json"]) == 0
    as_json: dict[str, Any] = json.loads(capsys.readouterr().out)
    last = json.loads((finished_run / "metrics.jsonl").read_text().splitlines()[-1])
    assert {name: last[name] for name in as_json} == pytest.approx(as_json, abs=1e-8)
    assert as_json["eval/prompts"] == 2.0
    assert cli.main(["eval", str(finished_run)]) == 0
    shown = metrics_of(capsys.readouterr().out)
    assert set(shown) >= {"eval/accuracy", "eval/reward_mean", "eval/stop_rate", "eval/length_mean", "eval/prompts"}
    assert shown == pytest.approx({name: as_json[name] for name in shown}, rel=1e-3)
    assert snapshot(finished_run) == before


def test_eval_of_a_model_takes_data_and_rewards_from_settings(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "eval.toml").write_text(SETTINGS + HELD_OUT)
    before = snapshot(here)
    assert cli.main(["eval", "embedded", "eval.toml", "--eval.data.max_rows=3"]) == 0
    metrics = metrics_of(capsys.readouterr().out)
    assert metrics["eval/prompts"] == 3.0
    assert 0.0 <= metrics["eval/accuracy"] <= 1.0
    assert snapshot(here) == before


def test_eval_of_a_run_takes_held_out_data_from_the_command_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "good.toml", "--quiet"]) == 0
    capsys.readouterr()
    assert cli.main(["eval", "run", "--eval.data.split=held_out", "--eval.data.max_rows=4"]) == 0
    assert metrics_of(capsys.readouterr().out)["eval/prompts"] == 4.0


def test_eval_of_a_run_that_is_not_finished_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "run").mkdir()
    (here / "run" / "settings.toml").write_text(SETTINGS + HELD_OUT)
    assert refused(here, capsys, "eval", "run") == (
        "run has no trained model yet: run/final is written when the run finishes"
    )
