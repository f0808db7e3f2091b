"""Conversations where stages run elsewhere: the same episodes in a pool, on Ray and as tasks of Flyte."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from podium.settings.tables import Settings
from tests.commands import podium
from tests.rollout.test_conversation import GAMES

PLACES: dict[str, dict[str, Any]] = {
    "pool": {"engine": {"name": "pool"}},
    "ray": {"runtime": {"name": "ray", "rollout_workers": 1, "reward_workers": 1}},
    "flyte": {"runtime": {"name": "flyte", "prompts_per_task": 3}},
}
pytestmark = pytest.mark.timeout(600)


def played(folder: Path, **others: Any) -> list[list[Any]]:
    """Who each rollout of one step is, and that it was a conversation."""
    tables: dict[str, Any] = {
        "run": {"steps": 1, "prompts_per_step": 3, "rollouts_per_prompt": 4, "folder": str(folder)},
        "data": [{"name": "arithmetic", "max_rows": 100}],
        "rollout": {"name": "conversation", "max_turns": 3, "max_new_tokens": 90, "max_read_tokens": 60},
        "environment": {"name": f"{GAMES}:Retry"},
        "report": [{"name": "page"}],
    }
    path = folder.with_suffix(".toml")
    path.write_text(Settings.from_dict(tables | others).to_toml())
    done = podium("train", str(path), timeout=300)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "rollouts/step-000001.jsonl").read_text().splitlines()]
    assert all(line["turns"][0][0] == "assistant" for line in lines)
    assert max(len(line["spans"]) for line in lines) > 1
    keys = ("ordinal", "sample_index", "seed", "policy_version", "prompt")
    return [[*(line[key] for key in keys), line["spans"][0][2]] for line in lines]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    return played(tmp_path_factory.mktemp("here") / "run")


@pytest.mark.parametrize("place", PLACES)
def test_conversations_elsewhere_are_those_of_one_process(tmp_path: Path, place: str, here: list[list[Any]]) -> None:
    """The last digits of logprobs, and so in rare cases a token, depend on which episodes an engine writes together."""
    if place in ("ray", "flyte") and importlib.util.find_spec(place) is None:
        pytest.skip(f"needs {place}")
    assert played(tmp_path / "run", **PLACES[place]) == here
