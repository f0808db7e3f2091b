"""G1, R1: the driver is killed at a hundred random moments, and every run ends with the bits of the unbroken one."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.harness import ChaosJobs, all_that_counts, events, leftovers, tiny_tables, write_tables

KILLS = 100
SHARE_IN_SAVE = 0.1

VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full weights, windows of 2": {"run": {"sync_every": 2}, "model": {"lora": False}, "trainer": {"lr": 1e-4}},
    "moving reference": {
        "model": {"reference": {"alpha": 0.5, "every": 2}},
        "loss": {"name": "tests.chaos.parts:noisy_loss", "kl_beta": 0.05},
    },
    "worker rewards": {"reward": [{"name": "tests.chaos.rewards:in_a_process"}]},
}


def tables_of(variant: str, folder: Path, **run: Any) -> dict[str, Any]:
    tables = tiny_tables(folder, **run)
    for section, changes in VARIANTS[variant].items():
        tables[section] = {**tables.get(section, {}), **changes} if isinstance(changes, dict) else changes
    return tables


def is_inside_a_save(folder: Path, num_before: int) -> bool:
    """Since then the event log has the beginning of a commit and not its end."""
    last = events(folder, "committing", "committed")[num_before:][-1:]
    return bool(last) and last[0]["event"] == "committing"


class Victim:
    """A run that is killed again and again until it is through."""

    def __init__(self, server: ChaosJobs, folder: Path, variant: str, seed: int) -> None:
        self._server, self.folder = server, folder
        self._settings = write_tables(tables_of(variant, folder, seed=seed))

    def attempt(self, **job: Any) -> int:
        has_begun = (self.folder / "settings.toml").exists()
        arguments = ("resume", str(self.folder)) if has_begun else ("train", self._settings)
        if not has_begun and self.folder.exists():  # killed before it was a run: only its lock is there
            for path in self.folder.iterdir():
                path.unlink()
        return self._server.run(*arguments, **job)


def kill_again_and_again(server: ChaosJobs, scratch: Path, kills: int, seeds: int, seed: int) -> dict[str, int]:
    """Counts of what happened; every run that was begun is brought to its end and compared."""
    rng = random.Random(seed)
    clean: dict[tuple[str, int], Any] = {}
    count = {"kills": 0, "in_save": 0, "runs": 0}
    while count["kills"] < kills:
        variant, run_seed = list(VARIANTS)[count["runs"] % len(VARIANTS)], count["runs"] % seeds
        if (variant, run_seed) not in clean:
            folder = scratch / f"clean-{len(clean)}"
            started = time.monotonic()
            assert Victim(server, folder, variant, run_seed).attempt() == 0, server.log
            clean[variant, run_seed] = all_that_counts(folder), time.monotonic() - started
        expected, duration = clean[variant, run_seed]
        victim = Victim(server, scratch / f"victim-{count['runs']}", variant, run_seed)
        while True:
            num_before = len(events(victim.folder, "committing", "committed"))
            if (status := victim.attempt(**a_kill(rng, duration))) == 0:
                break
            assert status == -signal.SIGKILL, server.log
            count["kills"] += 1
            count["in_save"] += is_inside_a_save(victim.folder, num_before)
        assert all_that_counts(victim.folder) == expected, f"seed {seed}, run {count['runs']}"
        assert leftovers(victim.folder) == []
        count["runs"] += 1
    return count


def a_kill(rng: random.Random, duration: float) -> dict[str, Any]:
    """Two of three at any moment of the run, one of three aimed at a save."""
    if rng.random() < 2 / 3:
        return {"kill_after_s": rng.uniform(0, duration)}
    aim = {"KILL_IN_SAVE": str(rng.randint(1, 4)), "KILL_SEED": str(rng.random())}
    return {"prepare": ["tests.chaos.faults:kill_in_save"], "environment": aim}


@pytest.mark.timeout(900)
def test_g1_a_hundred_kills_at_random_moments_change_no_bit(server: ChaosJobs, tmp_path: Path) -> None:
    count = kill_again_and_again(server, tmp_path, KILLS, seeds=1, seed=20_26)
    assert count["kills"] >= KILLS
    assert count["in_save"] >= SHARE_IN_SAVE * count["kills"], count
    print(count)
