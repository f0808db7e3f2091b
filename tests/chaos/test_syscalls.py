"""G2, R2, D1, D3: every file system call of a commit is broken in turn, by a kill, by a full disk and by a disk error.

strace does it to the running process, so nothing of Podium is replaced. Whatever breaks, the checkpoint before or the
new one can be trusted, and the next resume goes on from it.
"""

import asyncio
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from podium.errors import CheckpointError
from tests.chaos.harness import ChaosJobs, leftovers, wait_until
from tests.chaos.mini import make_run, one_step, restored

CALLS = (
    *("openat", "mkdir", "write", "writev", "pwrite64", "fsync", "fdatasync", "ftruncate", "close"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir"),
)
FAULTS = {"kill": "signal=SIGKILL", "full disk": "error=ENOSPC", "disk error": "error=EIO"}

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")


def commit_under(server: ChaosJobs, run: Path, *options: str) -> tuple[int, str]:
    """Exit status of one commit under strace, and strace's own account of it."""
    log = Path(f"{run}.strace")
    finish = server.start({"call": "tests.chaos.mini:step_when_told", "given": [str(run)]})
    wait_until(Path(f"{run}.ready").exists)
    tracer = subprocess.Popen(
        ["strace", "-f", "-p", str(server.pid), "-o", str(log), *options], stderr=subprocess.PIPE, text=True
    )
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        Path(f"{run}.go").touch()
        finish()
        pytest.skip(f"strace cannot attach here: {said}")
    Path(f"{run}.go").touch()
    status = finish()
    tracer.wait(timeout=60)
    tracer.stderr.close()
    return status, log.read_text(errors="replace")


def calls_of(account: str) -> Counter[str]:
    """How often the thread that writes the checkpoint makes each call."""
    writer = next(line.split()[0] for line in account.splitlines() if re.search(r"\.tmp-.*trainer", line))
    names = re.findall(rf"^{writer} +(\w+)\(", account, re.MULTILINE)
    return Counter(name for name in names if name in CALLS)


@pytest.mark.timeout(900)
def test_g2_every_file_call_of_a_commit_may_fail(server: ChaosJobs, tmp_path: Path) -> None:
    make_run(str(tmp_path / "start"), 2)
    shutil.copytree(tmp_path / "start", tmp_path / "clean")
    status, account = commit_under(server, tmp_path / "clean", "-e", "trace=" + ",".join(CALLS))
    assert status == 0, server.log
    assert restored(tmp_path / "clean") == (3, 3.0, [1, 2, 3])
    found = calls_of(account)
    assert found["fsync"] >= 6, found  # four files, their folder, the parent at the least
    assert sum(found.values()) >= 26, found
    fired: Counter[str] = Counter()
    for name, count in found.items():
        for number in range(1, count + 1):
            for fault, what in FAULTS.items():
                run = tmp_path / f"{name}-{number}-{fault.replace(' ', '-')}"
                shutil.copytree(tmp_path / "start", run)
                status, account = commit_under(server, run, "-e", f"inject={name}:{what}:when={number}")
                has_fired = "killed by SIGKILL" in account if fault == "kill" else "(INJECTED)" in account
                assert has_fired, (name, number, fault)
                fired[fault] += 1
                assert status in ((-9,) if fault == "kill" else (0, 1)), (name, number, fault, server.log)
                step, weight, lines = restored(run)
                assert (step, weight, lines) in ((2, 2.0, [1, 2]), (3, 3.0, [1, 2, 3])), (name, number, fault)
                assert status != 0 or step == 3, (name, number, fault)
                assert leftovers(run) == []
                shutil.rmtree(run)
    assert set(fired.values()) == {sum(found.values())}
    print(dict(found), dict(fired))


def test_r3_a_kill_while_old_checkpoints_are_deleted_leaves_the_new_one(server: ChaosJobs, tmp_path: Path) -> None:
    make_run(str(tmp_path / "run"), 2)
    status, account = commit_under(server, tmp_path / "run", "-e", "inject=unlinkat:signal=SIGKILL:when=2")
    assert status == -9
    assert "killed by SIGKILL" in account
    assert any(".tmp-" in name for name in leftovers(tmp_path / "run"))  # half deleted
    assert restored(tmp_path / "run") == (3, 3.0, [1, 2, 3])
    assert leftovers(tmp_path / "run") == []


def test_d1_a_disk_that_is_full_is_told_by_its_name_and_the_run_goes_on_after(tmp_path: Path) -> None:
    """A file system of 256 kB, really full."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(small)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    try:
        make_run(str(small / "run"), 1)
        (small / "ballast").write_bytes(b"x" * (small_free(small) - 4096))
        with pytest.raises((CheckpointError, OSError), match="No space left"):
            asyncio.run(one_step(small / "run"))
        assert leftovers(small / "run") == []
        (small / "ballast").unlink()
        assert restored(small / "run") == (1, 1.0, [1])
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


def small_free(path: Path) -> int:
    return shutil.disk_usage(path).free
