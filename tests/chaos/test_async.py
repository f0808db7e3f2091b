"""G3, R5: every rollout of the async loop is trained once, whoever is killed: its workers, the run itself, or both."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from podium.rollout.single_turn import rollout_seed
from tests.chaos.harness import ChaosJobs, events, tiny_tables, wait_until, write_tables

STEPS = 120
"""Of each schedule; `make soak` makes 1,000 of them."""
MIN_CRASHES_PER_STEP = 0.01
MAX_LAG = 2
ROWS = 12
STOP_EVERY = 8
"""One in eight workers, the third of an attempt first, is frozen instead of killed."""
MAX_AIM_S = 2.0
"""The run may have just ended, or wait for a frozen worker."""
RESUMES = 5


def async_tables(folder: Path, **run: Any) -> dict[str, Any]:
    """2 prompts × 2 rollouts a step, each step an update, so that the policy version is the step."""
    tables = tiny_tables(folder, **{"max_lag": MAX_LAG, "rollouts_per_prompt": 2} | run)
    reward = [{"name": "tests.chaos.rewards:even_tokens"}]
    return tables | {"filter": {"accept": "all"}, "rollout": {"max_new_tokens": 16}, "reward": reward}


def pool_tables(folder: Path, **run: Any) -> dict[str, Any]:
    engine = {"name": "pool", "replicas": [2, 2], "frozen_s": 1.5, "max_redispatches": 20}
    return async_tables(folder, **run) | {"engine": engine, "checkpoint": {"every": 3, "keep": 2}}


def ledger(folder: Path) -> list[list[dict[str, Any]]]:
    """The rollouts of each step."""
    paths = sorted((folder / "rollouts").iterdir())
    return [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]


def check_ledger(folder: Path, steps: int, max_lag: int = MAX_LAG) -> None:
    """Every rollout of every prompt up to the end once, under its own seed and not too old; versions only rise."""
    made = ledger(folder)
    keys = sorted((line["ordinal"], line["sample_index"]) for step in made for line in step)
    assert keys == [(ordinal, k) for ordinal in range(2 * steps) for k in range(2)]
    assert [len(step) for step in made] == [4] * steps
    for before, step in enumerate(made):
        for line in step:
            assert line["trained"], line
            assert line["seed"] == rollout_seed(0, "train", line["ordinal"], line["sample_index"])
            oldest, newest = line["policy_version"]
            assert before - max_lag <= oldest <= newest <= before
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["version/policy"] for line in metrics] == list(range(1, steps + 1))
    assert events(folder, "dropped_group") == []
    prompts = {line["ordinal"]: line["prompt"] for step in made for line in step}
    epochs = [{prompts[o] for o in range(start, start + ROWS)} for start in range(0, len(prompts) - ROWS + 1, ROWS)]
    assert all(epoch == epochs[0] for epoch in epochs)  # a prompt that is sampled again is the one it was
    assert len(epochs[0]) == ROWS


@dataclass
class Assault:
    """Strikes workers of a run at random moments, and now and then the run itself, until it is through."""

    server: ChaosJobs
    folder: Path
    rng: random.Random
    driver_kills: int
    pause_s: float = 0.5
    """Between two strikes, on average."""
    crashes: dict[str, int] = field(default_factory=lambda: {"SIGKILL": 0, "SIGSTOP": 0, "driver": 0})
    """Those that the run's own log confirms."""
    redispatched: int = 0

    def run(self, tables: dict[str, Any]) -> None:
        forked = {"prepare": ["tests.forked_keepers:instead_of_interpreters"]}
        job = {"arguments": ["train", write_tables(tables)], **forked}
        steps = tables["run"]["steps"]
        ends = sorted(self.rng.randrange(steps // 8, steps - steps // 8) for _ in range(self.driver_kills))
        for end in [*ends, None]:
            past = len(events(self.folder))
            finish = self.server.start(job)
            self._strike(past, end)
            status = finish()
            assert status == (0 if end is None else -signal.SIGKILL), self.server.log
            job = {"arguments": ["resume", str(self.folder)], **forked}

    def _strike(self, past: int, end: int | None) -> None:
        """Workers, until the run is over or has made `end` steps; then it is killed."""
        struck: dict[str, str] = {}
        while Path(f"/proc/{self.server.pid}").exists():
            time.sleep(self.rng.uniform(0, 2 * self.pause_s))
            if end is not None and num_steps(self.folder) >= end:
                os.kill(self.server.pid, signal.SIGKILL)
                self.crashes["driver"] += 1
                break
            if len(struck) % 2 or not events(self.folder, "redispatched"):
                self._await_sampling()
            fresh = {name: pid for name, pid in living(events(self.folder)[past:]).items() if name not in struck}
            if len(fresh) > 1:  # one is left to go on
                name = self.rng.choice(sorted(fresh))
                struck[name] = "SIGSTOP" if len(struck) % STOP_EVERY == 2 else "SIGKILL"
                with suppress(ProcessLookupError):  # the run ended just now
                    os.kill(fresh[name], signal.Signals[struck[name]])
        log = events(self.folder)[past:]
        reasons = {event["worker"]: event["reason"] for event in log if event["event"] == "worker_lost"}
        for name, kind in struck.items():
            self.crashes[kind] += ("killed by SIGKILL" if kind == "SIGKILL" else "frozen") in reasons.get(name, "")
        self.redispatched += sum(event["event"] == "redispatched" for event in log)

    def _await_sampling(self) -> None:
        """Until prompts have just gone to the workers: a strike then often hits the middle of a rollout."""
        before, end = len(events(self.folder, "sampling")), time.monotonic() + MAX_AIM_S
        while len(events(self.folder, "sampling")) == before and time.monotonic() < end:
            time.sleep(0.005)


def living(log: list[dict[str, Any]]) -> dict[str, int]:
    """Workers in service by name, with their pids."""
    lost = {event["worker"] for event in log if event["event"] == "worker_lost"}
    return {e["worker"]: e["pid"] for e in log if e["event"] == "worker_started" and e["worker"] not in lost}


def num_steps(folder: Path) -> int:
    return len(list((folder / "rollouts").glob("step-*.jsonl")))


def crash_and_account(server: ChaosJobs, folder: Path, steps: int, in_flight: bool, seed: int, kills: int) -> Assault:
    """A run of so many steps under fire, whose ledger is right in the end; what hit it."""
    assault = Assault(server, folder, random.Random(seed), kills)
    assault.run(pool_tables(folder, steps=steps, in_flight=in_flight))
    check_ledger(folder, steps)
    assert len(events(folder, "restored")) == assault.crashes["driver"] == kills
    workers = assault.crashes["SIGKILL"] + assault.crashes["SIGSTOP"]
    assert workers >= MIN_CRASHES_PER_STEP * steps, assault.crashes
    assert assault.redispatched > 0  # some were in the middle of a rollout
    return assault


@pytest.mark.timeout(600)
@pytest.mark.parametrize("in_flight", [False, True])
def test_g3_crashes_of_workers_and_of_the_run_lose_and_repeat_no_rollout(
    in_flight: bool, server: ChaosJobs, tmp_path: Path
) -> None:
    assault = crash_and_account(server, tmp_path / "run", STEPS, in_flight, seed=in_flight, kills=1)
    assert assault.crashes["SIGSTOP"] > 0
    print(assault.crashes, assault.redispatched)


@pytest.mark.parametrize("in_flight", [False, True])
def test_r5_a_resume_with_finished_and_unfinished_groups_on_hand_draws_them_again_under_their_ids(
    in_flight: bool, server: ChaosJobs, tmp_path: Path
) -> None:
    """Killed and resumed again and again, with an engine whose answers overtake each other."""
    rng, run, steps = random.Random(in_flight), tmp_path / "run", 30
    tables = async_tables(run, steps=steps, max_lag=3, in_flight=in_flight)
    settings = write_tables(tables | {"engine": {"name": "tests.chaos.parts:TardyEngine"}})
    arguments = ["train", settings]
    owed: list[int] = []
    """Sent before the kill and not trained in the commit that the next resume finds."""
    finished = unfinished = 0
    for number in range(RESUMES + 1):
        past = len(events(run))
        finish = server.start({"arguments": arguments})
        if number < RESUMES:
            wait_until(lambda enough=4 * number + 2: num_steps(run) >= enough)
            time.sleep(rng.uniform(0, 0.1))
            os.kill(server.pid, signal.SIGKILL)
        assert finish() == (-signal.SIGKILL if number < RESUMES else 0), server.log
        log, arguments = events(run)[past:], ["resume", str(run)]
        sent = [event["ordinals"] for event in log if event["event"] == "sampling"]
        assert all(again == before for again, before in zip(sent[0], owed, strict=False))
        if number < RESUMES:
            trained = trained_in_newest_commit(run)
            owed = sorted({ordinal for ordinals in sent for ordinal in ordinals} - trained)
            whole = {event["ordinal"] for event in log if event["event"] == "group"}
            finished, unfinished = finished + len(whole & {*owed}), unfinished + len({*owed} - whole)
    check_ledger(run, steps, max_lag=3)
    assert finished >= RESUMES  # both kinds were on hand
    assert unfinished >= RESUMES


def trained_in_newest_commit(run: Path) -> set[int]:
    """Ordinals; none where the run was killed before its first commit."""
    kept = [path.name for path in (run / "checkpoints").iterdir() if ".tmp-" not in path.name]
    newest = max(kept, default="step-0")
    return {line["ordinal"] for step in ledger(run)[: int(newest.removeprefix("step-"))] for line in step}
