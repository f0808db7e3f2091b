"""Runs of two ranks through the command line: they learn like one process, and no rank's death hangs the others."""

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from podium.errors import EngineError, InputError
from podium.records import Answer, EngineTraits, Request, Sampling
from podium.run.folder import RunFolder
from podium.run.start import train as train_in_this_process
from podium.runtime.ranks import launch
from podium.runtime.ranks.launch import check_ranks
from podium.runtime.ranks.line import Line, RankedEngine, follow
from podium.settings.tables import Settings
from tests.commands import Process, fork_server, podium
from tests.runtime.forked_ranks import living_ranks
from tests.trainer.ranks import Pair

SETTINGS = """
[run]
steps = 6
prompts_per_step = 6
rollouts_per_prompt = 6
[model]
device = "cpu"
[rollout]
max_new_tokens = 24
[trainer]
lr = 5e-4
[checkpoint]
every = 2
[[data]]
name = "arithmetic"
max_rows = 1000
[[reward]]
name = "arithmetic"
"""


RANKS = "--runtime.ranks=2"


def train(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    settings = folder.with_suffix(".toml")
    settings.write_text(SETTINGS)
    return podium("train", str(settings), f"--run.folder={folder}", "--quiet", *flags)


MODULES = ("deepspeed",) if importlib.util.find_spec("deepspeed") else ()
END_S = {"podium.runtime.ranks.launch:END_S": 1.0}
"""A rank 0 that failed tries for so long to reach ranks that wait for it in the middle of a pass, in vain."""


def forked(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command whose ranks are forks of it instead of torchrun's processes; afterwards none of them is left."""
    with tempfile.TemporaryDirectory() as ranks:
        done = podium(
            *arguments,
            environment=os.environ | environment | {"FORKED_RANKS": ranks},
            modules=MODULES,
            prepare=["tests.runtime.forked_ranks:instead_of_torchrun"],
            constants=END_S,
        )
        assert living_ranks(Path(ranks)) == {}
    return done


def train_forked(folder: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    settings = folder.with_suffix(".toml")
    settings.write_text(SETTINGS)
    flags = (f"--run.folder={folder}", "--quiet", *flags)
    return forked("train", str(settings), *flags, **environment)


def started(folder: Path, *flags: str, **others: Any) -> Process:
    """`others` as of ForkServer.start."""
    settings, stderr = folder.with_suffix(".toml"), folder.with_suffix(".stderr")
    settings.write_text(SETTINGS)
    command = ("train", str(settings), f"--run.folder={folder}", RANKS, *flags)
    return fork_server().start(*command, stdout=folder.with_suffix(".stdout"), stderr=stderr, **others)


def ledger(folder: Path) -> list[tuple[int, int, list[int]]]:
    """(ordinal, sample index, token ids) of every trained rollout."""
    texts = [path.read_text() for path in sorted((folder / "rollouts").iterdir())]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return sorted((line["ordinal"], line["sample_index"], line["token_ids"]) for line in lines)


def rewards(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["reward/mean"] for line in lines if "reward/mean" in line]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    done = train(folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("trainer", ["single", "fsdp"])
def test_two_ranks_learn_as_one_does_and_a_checkpoint_of_two_goes_on_with_one(
    one: Path, tmp_path: Path, trainer: str
) -> None:
    """Every rank that holds all weights writes its share of the rollouts: the same ones, since seeds decide."""
    folder = tmp_path / "two"
    start = train if trainer == "single" else train_forked  # by torchrun once
    done = start(folder, RANKS, f"--trainer.name={trainer}")
    assert done.returncode == 0, done.stderr
    assert len(ledger(folder)) == len(ledger(one))
    assert rewards(folder)[0] == rewards(one)[0]
    assert rewards(folder) == pytest.approx(rewards(one), abs=0.3)
    flags = ["--run.steps=7", "--runtime.ranks=1", "--allow-change", "runtime.ranks", "--quiet"]
    if trainer != "single":
        flags += ["--trainer.name=single", "--allow-change", "trainer.name"]
    again = podium("resume", str(folder), *flags)
    assert again.returncode == 0, again.stderr
    assert len(rewards(folder)) == 7


def ranks_of(mark: str) -> dict[int, int]:
    """Rank → process id of the ranks whose environment has the mark."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            command = (entry / "cmdline").read_bytes() if environment else b""
        except OSError:
            continue
        parts = dict(part.split(b"=", 1) for part in environment.split(b"\0") if b"=" in part)
        is_rank = b"podium.runtime.ranks.launch" in command and b"RANK" in parts
        if is_rank and parts.get(b"PODIUM_TEST") == mark.encode():
            found[int(parts[b"RANK"])] = int(entry.name)
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_with_a_typed_error(tmp_path: Path, victim: int) -> None:
    """Rank 1 is torchrun's, rank 0 a fork."""
    folder, mark, ranks = tmp_path / "run", f"kill-{victim}-{os.getpid()}", tmp_path / "ranks"
    ranks.mkdir()
    environment = os.environ | {"PODIUM_TEST": mark, "FORKED_RANKS": str(ranks)}
    prepare = [] if victim else ["tests.runtime.forked_ranks:instead_of_torchrun"]

    def living() -> dict[int, int]:
        return ranks_of(mark) if victim else living_ranks(ranks)

    process = started(folder, "--run.steps=5000", environment=environment, prepare=prepare)
    try:
        deadline = time.monotonic() + 120
        while not any((folder / "checkpoints").glob("step-*")):
            assert time.monotonic() < deadline, "no checkpoint in time"
            time.sleep(0.05)
        victims = living()
        assert set(victims) == {0, 1}
        os.kill(victims[victim], signal.SIGKILL)
        process.wait(60)
    finally:
        process.kill()
    error = folder.with_suffix(".stderr").read_text()
    assert process.returncode == 1
    assert "podium: " in error
    assert "rank" in error.rpartition("podium: ")[2]
    deadline = time.monotonic() + 5
    while living() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living() == {}


SHORT_OF_MEMORY = """
import os
import torch
from podium.loss.grpo import grpo

def short_of_memory(policy_logprobs, old_logprobs, batch):
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("too large")
    return grpo(policy_logprobs, old_logprobs, batch)
"""


def test_a_rank_whose_batch_does_not_fit_says_what_to_do_and_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(SHORT_OF_MEMORY)
    loss = f"--loss.name={tmp_path / 'losses.py'}:short_of_memory"
    done = train_forked(tmp_path / "run", RANKS, "--trainer.name=fsdp", loss)
    assert done.returncode == 1, done.stderr
    assert "podium: rank 1: a batch does not fit into memory" in done.stderr
    assert "lower pack.max_tokens_per_batch" in done.stderr


TROUBLE = """
import os
import torch
import podium.trainer.deepspeed, podium.trainer.fsdp, podium.trainer.single
from podium.loss.grpo import grpo

kind, rank = os.environ["TROUBLE"].split("-")

def is_mine():
    return os.environ.get("RANK") == rank

def fail(*_):
    raise RuntimeError("broken on purpose")

def failing(forward):
    def passing(model, *others):
        if is_mine() and kind == ("forward" if torch.is_grad_enabled() else "score"):
            model.get_decoder().layers[-1].register_forward_pre_hook(fail)  # in the middle of the pass
        return forward(model, *others)
    return passing

for module in (podium.trainer.deepspeed, podium.trainer.fsdp, podium.trainer.single):
    module.policy_logprobs = failing(module.policy_logprobs)

class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logprobs):
        return logprobs.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail()

def loss(policy_logprobs, old_logprobs, batch):
    if is_mine() and kind == "backward":
        policy_logprobs = Broken.apply(policy_logprobs)
    return grpo(policy_logprobs, old_logprobs, batch)
"""
DEEPSPEED = ("--trainer.name=deepspeed",)
TROUBLES = {
    "forward-0": ("--trainer.name=fsdp",),
    "forward-1": (*DEEPSPEED, "--trainer.zero=3"),
    "backward-0": (*DEEPSPEED, "--trainer.zero=3"),
    "backward-1": ("--trainer.name=fsdp", "--trainer.epochs_per_batch=2"),
    "score-0": (*DEEPSPEED, "--trainer.zero=3"),
    "score-1": ("--trainer.name=fsdp",),
    "forward-1, single": ("--trainer.name=single",),
    "backward-0, zero-2": (*DEEPSPEED, "--trainer.zero=2"),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_an_error_on_one_rank_ends_all_ranks_with_the_cause(tmp_path: Path, trouble: str) -> None:
    """Also where the other rank waits inside a pass for weights or gradients of the one that failed."""
    if DEEPSPEED[0] in TROUBLES[trouble] and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed (extra deepspeed)")
    (tmp_path / "trouble.py").write_text(TROUBLE)
    where = trouble.partition(",")[0]
    loss = f"--loss.name={tmp_path / 'trouble.py'}:loss"
    # its limit is far below the ten minutes after which a collective call is given up
    done = train_forked(tmp_path / "run", RANKS, loss, *TROUBLES[trouble], TROUBLE=where)
    told = done.stderr.rpartition("podium: ")[2]
    assert "RuntimeError: broken on purpose" in told
    if where.startswith("backward"):  # through the loss that was given, which is named instead of the rank
        assert "loss.name" in told
        assert done.returncode == InputError.exit_code, done.stderr
    else:
        assert told.startswith(f"rank {where[-1]}: ")
        assert done.returncode == 1, done.stderr


@pytest.mark.parametrize(
    ("ranks", "tables", "complaint"),
    [
        (1, {"trainer": {"name": "fsdp"}}, "for several ranks"),
        (2, {"trainer": {"name": "fsdp"}, "pack": {"shared_prefix": True}}, r"pack\.shared_prefix does not go with"),
        (2, {"trainer": {"name": "fsdp", "optimizer": "adamw_8bit"}}, r"trainer\.optimizer must be 'adamw'"),
    ],
)
def test_what_ranks_cannot_have_is_refused(ranks: int, tables: dict, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        check_ranks(Settings.from_dict({**tables, "reward": [{"name": "arithmetic"}]}), ranks)


def test_a_trainer_whose_package_is_missing_is_refused_before_any_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "find_spec", lambda name: None)
    monkeypatch.setattr(launch.subprocess, "Popen", None)  # nothing can be started
    tables = {"run": {"folder": str(tmp_path / "run")}, "reward": [{"name": "arithmetic"}]}
    ranks = {"trainer": {"name": "deepspeed"}, "runtime": {"ranks": 2}}
    with pytest.raises(InputError, match="DeepSpeed is not installed; pip install deepspeed, or use 'fsdp'"):
        train_in_this_process(Settings.from_dict(tables | ranks))
    assert not (tmp_path / "run").exists()


def final_adapter(folder: Path) -> dict[str, Any]:
    return load_file(folder / "final" / "adapter_model.safetensors")


def test_a_run_of_two_ranks_with_a_random_loss_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The ranks' batches differ in size, so after a step their random states do too."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = (
        RANKS,
        "--loss.name=tests.chaos.parts:noisy_loss",
        "--run.prompts_per_step=3",
        "--run.rollouts_per_prompt=3",
    )
    done = train_forked(whole, *flags, "--run.steps=4")
    assert done.returncode == 0, done.stderr
    done = train_forked(parts, *flags, "--run.steps=2")
    assert done.returncode == 0, done.stderr
    done = forked("resume", str(parts), "--run.steps=4", "--quiet")
    assert done.returncode == 0, done.stderr
    assert ledger(parts) == ledger(whole)
    found, expected = final_adapter(parts), final_adapter(whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_signal_while_two_ranks_sample_ends_the_run_with_a_commit_and_no_process_left(tmp_path: Path) -> None:
    folder, mark = tmp_path / "run", f"stop-{os.getpid()}"
    sizes = ("--run.steps=5000", "--run.prompts_per_step=60", "--checkpoint.every=1000")
    process = started(folder, *sizes, environment=os.environ | {"PODIUM_TEST": mark})
    try:
        deadline = time.monotonic() + 240
        while (
            len(list(RunFolder(folder).events_of("sampling"))) < 2
        ):  # then the second step's rollouts are being written
            assert time.monotonic() < deadline, "no step in time"
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, folder.with_suffix(".stderr").read_text()
    steps = len(rewards(folder))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{steps:06d}"]
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    assert ranks_of(mark) == {}


def stop_early(rank: int, ranks: int) -> int:
    """Rank 0 wants no more answers while the other rank has hours of them to write; how many that one wrote."""
    line, written = Line(), 0

    class Engine:
        policy_version, traits = 0, EngineTraits(channels=("shared",))

        async def generate(self, request):
            nonlocal written
            await asyncio.sleep(3600 if rank == 0 else 0.01 * request.seed)
            written += 1
            return Answer((1,), (-1.0,), "stop", (0, 0))

    engine: Any = Engine()
    if rank:
        follow(line, None, engine)
        return written

    async def ask() -> None:
        ranked = RankedEngine(engine, engine, line)
        async with asyncio.timeout(1.0):
            await asyncio.gather(*(ranked.generate(Request((1,), Sampling(), seed)) for seed in (1, 1, 2, LONG)))

    with pytest.raises(TimeoutError):
        asyncio.run(ask())
    with line.order("end"):
        return written


LONG = 360_000
"""Hundredths of a second: an hour."""


def test_a_rank_gives_up_writing_when_rank_0_does(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    try:
        assert pair(stop_early)[1] == 1
    finally:
        pair.close()


def leave_early(rank: int, ranks: int) -> str:
    """Rank 0's own engine fails while the other rank writes its share; the next order must come through."""
    line = Line()

    class Engine:
        policy_version, traits = 0, EngineTraits(channels=("shared",))

        async def generate(self, request):
            if rank == 0:
                raise EngineError("broken on purpose")
            return Answer((1,), (-1.0,), "stop", (0, 0))

    engine: Any = Engine()
    if rank:
        follow(line, None, engine)
        return "ended"

    async def ask() -> None:
        ranked = RankedEngine(engine, engine, line)
        await asyncio.gather(*(ranked.generate(Request((1,), Sampling(), seed)) for seed in range(4)))

    with pytest.raises(EngineError, match="broken on purpose"):
        asyncio.run(ask())
    with line.order("end"):
        return "ended"


def test_a_rank_that_fails_while_others_write_leaves_them_in_step(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    try:
        assert pair(leave_early) == ["ended", "ended"]
    finally:
        pair.close()
