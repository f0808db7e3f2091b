"""A run whose engine is a user's, in one file; the page that shows the engine."""

from pathlib import Path

import pytest

from podium.cli import main

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("user_engine.py")
SETTINGS = ROOT / "examples" / "arithmetic" / "settings.toml"
FEW = ["--run.steps=2", "--run.prompts_per_step=4", "--run.rollouts_per_prompt=4", "--eval.data.max_rows=20", "--quiet"]


def test_the_demos_settings_train_with_a_users_engine_and_repeat_bit_for_bit(tmp_path: Path) -> None:
    for name in ("one", "two"):
        flags = [f"--engine.name={FILE}:MyEngine", f"--run.folder={tmp_path / name}", *FEW]
        assert main(["train", str(SETTINGS), *flags]) == 0
    rollouts = [sorted((tmp_path / name / "rollouts").glob("*")) for name in ("one", "two")]
    assert len(rollouts[0]) == 2
    assert [path.read_bytes() for path in rollouts[0]] == [path.read_bytes() for path in rollouts[1]]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("traits = ", "kind = "), "its attribute 'traits' is None; give"),
        (("def release(", "def let_go("), "it has no method 'release'; needed: generate, release, score, close"),
        (("async def load_weights(", "async def take("), "its traits promise a method 'load_weights'"),
    ],
)
def test_an_engine_without_what_it_needs_is_refused_before_the_run(
    change: tuple[str, str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "other_engine.py"
    file.write_text(FILE.read_text().replace(*change))
    flags = [f"--engine.name={file}:MyEngine", f"--run.folder={tmp_path / 'run'}", *FEW]
    assert main(["train", str(SETTINGS), *flags]) == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_the_page_shows_the_engine_that_passes_the_contract() -> None:
    shown = (ROOT / "docs/how_to/add_an_engine.md").read_text().split("```python\n# my_engine.py\n")[1].split("```")[0]
    assert shown.strip() == FILE.read_text().split('"""\n', 1)[1].strip()
