"""What is no regular file is never waited for, wherever Podium reads what others may have put there."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from podium.errors import CheckpointError, WeightsError
from podium.model.handoff import read_manifest
from podium.report.web.reader import RunReader
from podium.run.checkpoint import newest_checkpoint, write_checkpoint
from podium.run.folder import RunFolder
from podium.untrusted import open_regular, read_regular


def put_socket(path: Path) -> None:
    """By a short name: a socket's has 107 bytes at most."""
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)


def put_linked_fifo(path: Path) -> None:
    os.mkfifo(f"{path}-fifo")
    path.symlink_to(f"{path}-fifo")


KINDS: dict[str, Callable[[Path], None]] = {
    "FIFO": os.mkfifo,
    "folder": Path.mkdir,
    "socket": put_socket,
    "link to a FIFO": put_linked_fifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path / "it")
    with pytest.raises(OSError, match=r"no regular file|No such device"):
        open_regular(tmp_path / "it")


def test_a_link_is_followed_unless_it_must_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link") == b"content"
    with pytest.raises(OSError, match="symbolic links"):
        read_regular(tmp_path / "link", follow_links=False)


def test_a_file_beyond_its_limit_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    assert read_regular(tmp_path / "file", max_bytes=7) == b"content"
    with pytest.raises(OSError, match="more than 6 bytes"):
        read_regular(tmp_path / "file", max_bytes=6)


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "trainer.safetensors", "settings.toml"])
def test_a_checkpoint_with_a_fifo_in_it_is_refused(name: str, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints" / "step-000001"
    write_checkpoint(place, {"weights.a": torch.zeros(2)}, {"step": 1}, "", [])
    assert newest_checkpoint(tmp_path) == place
    (place / name).unlink()
    os.mkfifo(place / name)
    with pytest.raises(CheckpointError, match=r"no regular file"):
        newest_checkpoint(tmp_path)


def test_a_manifest_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "weights.json")
    with pytest.raises(WeightsError):
        read_manifest(tmp_path / "weights")


def test_a_page_reads_past_fifos(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for name in ("metrics.jsonl", "events.jsonl", "tokens.jsonl", "status.json", "restarts.json", "settings.toml"):
        os.mkfifo(tmp_path / name)
    for name in ("rollouts/step-000001.jsonl", "lock"):
        os.mkfifo(tmp_path / name)
    reader = RunReader(RunFolder(tmp_path))
    reader.refresh()
    assert reader.data()["status"]["step"] == 0
    assert reader.step_rollouts(1)["rollouts"] == []


def test_a_disk_that_does_not_answer_holds_neither_a_request_nor_the_end_of_the_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    code = f"""
import asyncio
from podium.server.door import Refusal
from podium.server.served import within
async def main():
    assert await within(60, "adding", lambda a, b: a + b, 1, 2) == 3
    try:
        await within(60, "failing", int, "x")
    except ValueError:
        print("raised")
    try:
        await within(0.2, "reading x", open, {str(tmp_path / "fifo")!r})
    except Refusal as refusal:
        print(refusal.status, refusal.message)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "raised\n503 reading x took more than 0.2 s\n", done.stderr
