"""The shape of the project: which part may import which, and what loads torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import podium

ROOT = Path(podium.__file__).parent
BELOW_STAGES = {"errors", "files", "records", "stages", "model", "terminal"}
ALLOWED = {
    "errors": set(),
    "files": set(),
    "terminal": set(),
    "plan": set(),
    "temperature": set(),
    "records": {"plan"},
    "processes": set(),
    "stages": {"records"},
    "clock": {"records"},
    "loop": {"clock", "errors", "records", "stages"},
    "flights": {"clock", "records", "stages"},
    "loop_async": {"clock", "flights", "loop", "records", "stages"},
    "estimates": set(),
    "evaluation": {"estimates", "records", "stages"},
    "scorecard": {"errors", "estimates", "evaluation", "report"},
    "contracts": {"errors"},
    "names": set(),
    "lookup": {"contracts", "errors"},
    "sections": {"contracts", "errors", "lookup", "loss", "names", "temperature"},
    "settings": {"errors", "lookup", "records", "sections"},
    "run_folder": {"errors", "files"},
    "trained": {"errors", "run_folder", "settings"},
    "reference": {"lookup", "sections"},
    "model_card": {"ledger", "run_folder", "settings"},
    "ledger": {"errors", "run_folder"},
    "model": {"errors", "files", "records"},
    "data": BELOW_STAGES,
    "rollout": BELOW_STAGES | {"temperature"},
    "engine": BELOW_STAGES | {"lookup", "processes"},  # a pool's members are engines by their names
    "reward": BELOW_STAGES | {"lookup", "processes"},  # a worker process finds its rewards by their names
    "advantage": BELOW_STAGES,
    "filter": {"records"},
    "pack": {"records"},
    "loss": BELOW_STAGES,
    "trainer": BELOW_STAGES,
    "sync": BELOW_STAGES,
    "server": BELOW_STAGES | {"temperature"},  # it is handed an engine and never finds one
    "checkpoint": {"checkpoint_files", "errors", "ledger", "records", "run_folder", "stages"},
    "checkpoint_files": {"errors", "files"},
    "resume_rules": {"errors", "lookup", "sections", "settings", "trainer"},  # what a schedule makes of a length
    "report": {"errors", "files", "ledger", "records", "run_folder", "stages", "terminal"},
    "assets": {"data"},
}
"""Part → the parts that it may import, itself aside. A stage's folder never imports another's."""

TOP = {"__init__", "runtime", "run", "calibrate", "check", "export", "push", "timing", "workbench", "cli"}
"""Parts that wire the others and may import them all."""

MODULES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(ROOT)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_parts(path: Path) -> set[str]:
    """Parts of podium that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "podium":
            inner = (node.module or "").split(".")[1:]
            names |= {inner[0]} if inner else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("podium.")}
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    if part in TOP:
        return
    assert part in ALLOWED, f"{part} is new: add it to the table"
    assert imported_parts(path) - {part} <= ALLOWED[part]


def test_nothing_but_the_command_line_imports_the_command_line() -> None:
    assert [path for path in MODULES if "cli" in imported_parts(path)] == []


@pytest.mark.parametrize("name", ["loop.py", "loop_async.py"])
def test_a_loop_has_at_most_120_lines(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= 120


def test_importing_podium_and_its_command_line_loads_no_torch() -> None:
    code = "import sys, podium, podium.cli, podium.records, podium.stages; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_is(path: Path) -> None:
    if path.name == "__init__.py" and not path.read_text().strip():
        return
    assert ast.get_docstring(ast.parse(path.read_text())), "no module docstring"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_data_is_ever_executed(path: Path) -> None:
    """No pickle, eval, exec or torch.load anywhere but in what runs inside the sandbox."""
    if path.parent.name == "_inside":
        assert imported_parts(path) == set()
        return
    tree = ast.parse(path.read_text())
    called = {
        node.func.id if isinstance(node.func, ast.Name) else f"{ast.unparse(node.func)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    assert not called & {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "yaml.load"}
