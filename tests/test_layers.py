"""The shape of the project: which part may import which, and what loads torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import podium

ROOT = Path(podium.__file__).parent
BELOW_STAGES = {"errors", "records", "remote.codec", "stages", "model", "untrusted"}
FORKED = {"remote.fork_server", "remote.fork_server_process", "remote.workers"}
POOL = {"remote.engine_pool", "remote.tasks", "remote.pool", "remote.rollouts"}
RUN = {"run.checkpoint", "run.folder"}
SETTINGS = {f"settings.{name}" for name in ("contracts", "lookup", "refusals", "sections", "tables")}
STAGES = {"data", "rollout", "engine", "reward", "advantage", "filter", "pack", "loss", "trainer", "sync", "report"}
BUILT = {f"{stage}.build" for stage in STAGES - {"filter", "pack"}}
PLACED = BELOW_STAGES | SETTINGS | BUILT | {"run.build", "run.folder", "runtime.ranks", "runtime.wiring"}
"""What a runtime makes its stages with."""
ALLOWED = {
    "errors": set(),
    "untrusted": set(),
    "records": set(),
    "observer": {"errors", "records"},
    "stages": {"observer", "records"},
    "loop": {"errors", "observer", "records", "stages"},
    "flights": {"records", "stages"},
    "loop_async": {"flights", "loop", "records", "stages"},
    "tool": {"errors"},
    # Below the stages, as `model` is: data, rollouts and rewards are told of a run's tools and environment.
    "environment": {"errors", "records", "remote.codec", "remote.workers", *FORKED, *SETTINGS},
    "environment.build": {"environment", "errors", *SETTINGS},
    "model": {"errors", "records", "untrusted"},
    "data": BELOW_STAGES,
    "rollout": BELOW_STAGES | {"environment", "settings.contracts"},
    "engine": BELOW_STAGES | POOL | {"remote.fork_server", "settings.lookup"},  # a pool finds engines by their names
    "reward": BELOW_STAGES | FORKED | {"settings.lookup"},  # a worker process finds its rewards by names
    "advantage": BELOW_STAGES,
    "filter": {"errors", "records", *SETTINGS},
    "pack": {"records", "settings.tables"},
    "loss": BELOW_STAGES | {"settings.contracts"},
    "trainer": BELOW_STAGES,
    "sync": BELOW_STAGES,
    "server": BELOW_STAGES
    | {"remote.tasks", "remote.rollouts", "settings.contracts"},  # it is handed an engine and never finds one
    "report": {"errors", "records", "run.folder", "stages", "untrusted"},
    **{
        part: BELOW_STAGES | SETTINGS | {"environment.build", part.removesuffix(".build")}
        for part in BUILT - {"report.build"}
    },
    "report.build": {"errors", "records", "report", "run.folder", "stages", "untrusted", *SETTINGS},
    "server.serve": BELOW_STAGES | SETTINGS | {"engine.build", "export", "server"},
    "remote.codec": {"errors", "records"},
    "remote.engine_pool": {"errors", "model", "records", "stages", *POOL},
    "remote.fork_server": {"remote.fork_server_process", "remote.tasks", "untrusted"},
    "remote.fork_server_process": set(),
    "remote.tasks": {"errors"},
    "remote.pool": {"errors", "remote.tasks"},
    "remote.rollouts": {"errors", "records", "stages"},
    "remote.workers": {"remote.fork_server", "remote.fork_server_process", "untrusted"},
    "run.build": BELOW_STAGES | SETTINGS | RUN | {"trainer"},
    "run.checkpoint": {"errors", "records", "run.folder", "stages", "untrusted"},
    "run.folder": {"errors", "records", "untrusted"},
    "run.watchdog": {"errors", "observer", "run.folder"},
    "evaluation": {"errors", "records", "run.folder", "stages", "untrusted"},
    "runtime.wiring": PLACED | STAGES | RUN | {"evaluation", "observer", "remote.fork_server", "run.watchdog"},
    # torchrun starts a rank in runtime/ranks, and the rank then runs the whole command.
    "runtime.ranks": BELOW_STAGES | {"remote.rollouts", "run.folder", "run.start", "runtime.local", "settings.tables"},
    "runtime.local": PLACED,
    "runtime.ray": PLACED | {"runtime.on_ray"},
    "runtime.flyte": PLACED | {"runtime.on_flyte"},
    "runtime.on_ray": PLACED | POOL | {"engine", "reward", "server", "server.serve", "sync"},
    "runtime.on_flyte": PLACED | RUN | {"observer", "report", "reward", "sync"},
    "settings.contracts": {"errors", "records"},
    "settings.lookup": {"errors", "records", "settings.contracts"},
    "settings.sections": {"errors", "loss", "settings.contracts", "settings.lookup"},
    "settings.refusals": {"errors", "settings.contracts", "settings.lookup", "settings.sections", "settings.tables"},
    "settings.tables": {"errors", "records", *SETTINGS},
}
"""Part → the parts that it may import, itself aside. A stage's folder never imports another's."""

BY_FILE = {"check", "remote", "run", "runtime", "settings"}
"""Folders of which each file, or sub-folder, is a part of its own."""
OWN_PARTS = {"build", "serve"}
"""Files that are parts of their own in every folder: they make what the rest of the folder is given."""

TOP = {
    "__init__",
    "check.calibrate",
    "check.engine_contract",
    "check.rewards",
    "check.verdicts",
    "cli",
    "export",
    "run.start",
}
"""Parts that wire the others and may import them all."""

MODULES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    names = path.relative_to(ROOT).with_suffix("").parts
    return part(names[:-1] if len(names) > 1 and names[-1] == "__init__" else names)


def part(names: tuple[str, ...]) -> str:
    return ".".join(names[:2]) if names[0] in BY_FILE or OWN_PARTS.intersection(names[1:2]) else names[0]


def imported_parts(path: Path) -> set[str]:
    """Parts of podium that a module imports, anywhere in it."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "podium":
            inside = node.module in ("podium", *(f"podium.{folder}" for folder in BY_FILE))
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} if inside else {node.module or ""}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.startswith("podium.")}
    return {part(tuple(module.split(".")[1:])) for module in modules}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    own = part_of(path)
    if own in TOP or not path.read_text().strip():
        return
    assert own in ALLOWED, f"{own} is new: add it to the table"
    assert imported_parts(path) - {own} <= ALLOWED[own]


ENGINES = {"inprocess", "vllm_local", "vllm_server", "pool"}
OUTSIDE_ENGINES = [path for path in MODULES if part_of(path) != "engine" and not part_of(path).startswith("settings")]


def names_of_engines(tree: ast.AST) -> list[str]:
    """Where a module compares a name with an engine's, keeps a table of engines, or asks an engine what it has."""
    found = []
    for node in ast.walk(tree):
        constants: list[ast.AST | None] = []
        if isinstance(node, ast.Compare):
            constants = [node.left, *node.comparators] if "engine" in ast.unparse(node) else []
        elif isinstance(node, ast.Dict):
            constants = [*node.keys]
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            constants = [*node.elts]
        named = {each.value for each in constants if isinstance(each, ast.Constant) and isinstance(each.value, str)}
        if named & ENGINES or (isinstance(node, ast.Compare) and "auto" in named):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
        asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr")
        if asks and ast.unparse(node.args[0]).rpartition(".")[2].strip("_") == "engine":  # type: ignore[attr-defined]
            found.append(f"line {node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("path", OUTSIDE_ENGINES, ids=lambda path: str(path.relative_to(ROOT)))
def test_callers_ask_an_engines_traits_and_never_its_name(path: Path) -> None:
    assert names_of_engines(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "code",
    [
        "if settings.engine.name == 'inprocess': pass",
        "if settings.engine.name != 'auto': pass",
        "if engine in ('vllm_local', 'mine'): pass",
        "ENGINES = ('inprocess', 'vllm_local')",
        "PACKAGES = {'vllm_local': 'vllm'}",
        "getattr(engine, 'dtype', None)",
        "hasattr(self._engine, 'held')",
    ],
)
def test_a_test_of_an_engines_name_is_noticed(code: str) -> None:
    assert len(names_of_engines(ast.parse(code))) >= 1


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
    if path.parent == ROOT / "reward" / "sandbox" / "inside":
        assert imported_parts(path) == set()
        return
    tree = ast.parse(path.read_text())
    called = {
        node.func.id if isinstance(node.func, ast.Name) else f"{ast.unparse(node.func)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    }
    assert not called & {"eval", "exec", "torch.load", "pickle.load", "pickle.loads", "yaml.load"}
