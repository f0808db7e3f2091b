"""The documentation is true: its commands and code run as they stand, in their order, in an empty folder.

In a page an HTML comment before a block says what is special about it: `file: NAME` writes it to that file, `skip:
REASON` leaves it out, `needs: PACKAGE` leaves it out where that is not installed. Python blocks whose first line is a
comment with a file's name are written there. TOML blocks that are no files are read as settings. Examples are there as
in the repository's root.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from podium.cli import main
from podium.settings.tables import Settings
from tests import commands
from tools.settings_page import settings_reference

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "docs/quick_start.md",
    ROOT / "docs/tutorial.md",
    *(ROOT / "docs/how_to").glob("*.md"),
]
BLOCK = re.compile(r"(?:<!-- (?P<mark>\w+): (?P<value>.*?) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)```", re.DOTALL)
KINDS = {"sh", "python", "toml"}
FILE_COMMENT = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    mark: str
    value: str


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text())
    return [Block(each["kind"], each["text"], each["mark"] or "", each["value"] or "") for each in found]


def run_block(block: Block) -> None:
    if block.mark == "skip":
        assert len(block.value) > 10, "a block is left out without a reason"
        return
    if block.mark == "needs" and find_spec(block.value) is None:
        return
    file = block.value if block.mark == "file" else (FILE_COMMENT.match(block.text) or ("", ""))[1]
    if file:
        Path(file).write_text(block.text)
    elif block.kind == "sh":
        for line in block.text.splitlines():
            run_command(line)
    elif block.kind == "python":
        done = commands.call(f"{__name__}:run_python", block.text, folder=Path.cwd())
        assert done.returncode == 0, f"{block.text}\n{done.stderr}"
    else:
        Settings.from_dict({"reward": [{"name": "arithmetic"}]} | tomllib.loads(block.text))


def run_python(text: str) -> None:
    """In a process of its own that has torch already, as `python -c` runs it."""
    sys.path.insert(0, "")
    exec(compile(text, "<block>", "exec"), {"__name__": "__main__"})


def run_command(line: str) -> None:
    """`podium` in this process, which has torch already; anything else by the shell."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["podium"]:
        assert main(words[1:]) == 0, line
    elif words:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        done = subprocess.run(line, shell=True, env={"PATH": path}, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:unclosed file.*flyte/report/_template.html:ResourceWarning")  # Flyte's own
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_works_in_its_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    found = [block for block in blocks(page) if block.kind in KINDS]
    assert found
    for block in found:
        run_block(block)


def test_blocks_are_of_kinds_that_are_run() -> None:
    """A block of another kind would be shown and never tried."""
    shown = {block.kind for page in PAGES for block in blocks(page)}
    assert shown <= KINDS


def test_a_block_that_does_not_work_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, text in (
        ("sh", "podium show none.toml"),
        ("sh", "false"),
        ("python", "1/0"),
        ("toml", "[run]\nstepz = 1"),
    ):
        with pytest.raises((AssertionError, ValueError)):
            run_block(Block(kind, text, "", ""))
    with pytest.raises(AssertionError):
        run_block(Block("sh", "true", "skip", ""))


def test_the_page_of_settings_is_up_to_date() -> None:
    assert (ROOT / "docs/settings.md").read_text() == settings_reference(), "run `make docs`"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text()
    linked = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([^)#]+\.md)", index)}
    assert {page.resolve() for page in (ROOT / "docs").rglob("*.md")} - {ROOT / "docs/index.md"} <= linked


def test_every_message_of_the_troubleshooting_page_is_one_that_podium_says() -> None:
    """Quoted in the first column of the tables that begin with "message"."""
    said = " ".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    said = re.sub(r'["\']\s*\n\s*f?["\']', "", said)  # a message over several lines of code
    tables = (ROOT / "docs/troubleshooting.md").read_text().split("| message |")[1:]
    quoted = [row for table in tables for row in re.findall(r"^\| `([^`]+)` \|", table.split("\n\n")[0], re.MULTILINE)]
    assert len(quoted) > 20
    for message in quoted:
        for part in message.split("…"):
            assert part.strip() in said, message


def test_the_metrics_and_settings_of_the_troubleshooting_page_exist() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    explained = (ROOT / "docs/metrics.md").read_text()
    for name in re.findall(r"`([a-z]+/[a-z_]+)`", page):
        assert f"`{name}`" in explained, name
    reference = settings_reference()
    for section, key in re.findall(r"`([a-z]+)\.(?!jsonl|toml|md)([a-z_]+)(?: = [^`]*)?`", page):
        assert f"`[{section}]`" in reference, section
        assert f"| `{key}` |" in reference or f"`[{section}.{key}]`" in reference, f"{section}.{key}"
