"""docs/walkthrough.md names the files that one step of the demo really passes, stage by stage."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "walkthrough.md"
MAX_FILES = 33
"""Files that one prompt passes in a step. More files are harder to hold in mind: join some, or say why not."""
MAX_PLUMBING = 7
"""Of these, files that serve every stage."""


def section(heading: str) -> str:
    return PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def linked(text: str) -> list[str]:
    return re.findall(r"\]\(\.\./src/podium/([\w/]+\.py)\)", text)


def stages() -> list[list[str]]:
    """The files of each numbered stage."""
    return [linked(text) for text in re.split(r"^\d+\. ", section("One step"), flags=re.MULTILINE)[1:]]


def traced(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "tests.tracing", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return traced(tmp_path_factory.mktemp("walkthrough") / "run")


def test_the_page_names_exactly_the_files_that_a_step_passes(files: list[str]) -> None:
    named = [file for stage in stages() for file in stage] + linked(section("What every stage uses"))
    assert len(named) == len(set(named)), "a file is linked twice"
    assert set(named) == set(files)


def test_a_stage_names_its_files_in_the_order_of_their_first_call(files: list[str]) -> None:
    for stage in stages():
        assert stage == sorted(stage, key=files.index)


def test_the_stages_come_in_the_order_in_which_a_step_ends_them(files: list[str]) -> None:
    """By the last file of each: rewards are set up before the first rollout is there."""
    last = [files.index(stage[-1]) for stage in stages()]
    assert last == sorted(last)


def test_a_step_passes_no_more_files_than_the_page_says(files: list[str]) -> None:
    assert len(files) <= MAX_FILES
    assert len(linked(section("What every stage uses"))) <= MAX_PLUMBING
    assert f"{MAX_FILES} files" in PAGE.read_text()
    assert f"{MAX_PLUMBING} of them" in PAGE.read_text()


def test_every_other_link_of_the_page_leads_to_a_file() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
