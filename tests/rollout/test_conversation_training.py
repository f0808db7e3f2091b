"""Episodes are trained as they were played: the masked loss and its gradient by hand, and whole runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.cli import main
from podium.loss.grpo import grpo
from podium.loss.objective import Objective
from podium.model.forward import place, policy_logprobs
from podium.model.load import load_policy
from podium.pack import pack
from podium.records import Group
from podium.settings.tables import Model, Settings
from tests.rollout.test_conversation import GAMES, played


def episodes() -> Group:
    """Three episodes of one row with one, two and three turns of the policy."""
    said = [["#### 4"], ["#### 3", "#### 4"], ["1", "22", "#### 333"]]
    groups = [played(texts, environment="Retry", rollouts=1)[0][0] for texts in said]
    rollouts = tuple(group.rollouts[0] for group in groups)
    assert [len(rollout.spans) for rollout in rollouts] == [1, 2, 3]
    return replace(groups[0], rollouts=rollouts, rewards=(1.0, 1.0, 0.0), advantages=(0.5, 0.75, -1.25))


@pytest.mark.parametrize(("shared_prefix", "atol"), [(False, 1e-9), (True, 1e-6)])
def test_loss_and_gradient_are_those_of_a_batch_made_by_hand(shared_prefix: bool, atol: float) -> None:
    """loss = − Σ advantage · ratio / N over the N tokens that the policy wrote, with a ratio of 1."""
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": False}), seed=0)
    model, group = policy.model.double(), episodes()
    [batch] = pack([group], max_tokens_per_batch=10_000, temperature=1.0, shared_prefix=shared_prefix)
    count = sum(span.length for rollout in group.rollouts for span in rollout.spans)
    assert batch.num_loss_tokens == count

    logprobs, _ = policy_logprobs(model, place(batch, torch.device("cpu"), shared_prefix=shared_prefix))
    made = Objective(grpo)(logprobs, batch).loss
    made.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    by_hand = torch.zeros((), dtype=torch.float64)
    for rollout, advantage in zip(group.rollouts, group.advantages, strict=True):
        ids = [*group.prompt.token_ids, *rollout.token_ids]
        every = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        for span in rollout.spans:
            first = len(group.prompt.token_ids) + span.start
            for place_ in range(first, first + span.length):
                by_hand = by_hand - advantage * every[place_ - 1, ids[place_]] / count
    by_hand.backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, rtol=0, atol=atol), name


def settings_of(folder: Path, **others: Any) -> Path:
    tables: dict[str, Any] = {
        "run": {"steps": 2, "prompts_per_step": 4, "rollouts_per_prompt": 4, "folder": str(folder)},
        "data": [{"name": "arithmetic"}],
        "rollout": {"name": "conversation", "max_turns": 3, "max_new_tokens": 90, "max_read_tokens": 60},
        "environment": {"name": f"{GAMES}:Retry"},
        "trainer": {"lr": 5e-4},
    }
    path = folder.with_suffix(".toml")
    path.write_text(Settings.from_dict(tables | others).to_toml())
    return path


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_of_conversations_trains_and_its_mismatch_is_that_of_single_answers(tmp_path: Path) -> None:
    assert main(["train", str(settings_of(tmp_path / "run")), "--quiet"]) == 0
    steps = [line for line in lines(tmp_path / "run/metrics.jsonl") if not line.get("eval")]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["optim/updates"] == 1.0
        assert 0 < line["mismatch/abs_mean"] < 1e-6
        assert 1 < line["episodes/turns_mean"] <= 3
        assert line["episodes/failed"] == 0.0
    first = lines(tmp_path / "run/rollouts/step-000001.jsonl")
    longest = max(first, key=lambda line: len(line["turns"]))
    roles = [turn[0] for turn in longest["turns"]]
    assert roles[:4] == ["assistant", "user", "assistant", "user"]
    assert sum(span[1] for span in longest["spans"]) < len(longest["token_ids"])


def test_a_run_of_conversations_that_is_resumed_plays_the_same_prompts_with_the_same_seeds(tmp_path: Path) -> None:
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert main(["train", str(settings_of(whole)), "--quiet", "--checkpoint.every=1"]) == 0
    assert main(["train", str(settings_of(part)), "--quiet", "--checkpoint.every=1", "--run.steps=1"]) == 0
    assert main(["resume", str(part), "--quiet", "--run.steps=2"]) == 0
    for step in (1, 2):
        name = f"rollouts/step-{step:06}.jsonl"
        assert [who(line) for line in lines(part / name)] == [who(line) for line in lines(whole / name)]


def who(line: dict[str, Any]) -> list[Any]:
    """What a rollout is; the last digits of logprobs depend on which episodes are written at the same time."""
    return [line[key] for key in ("ordinal", "sample_index", "seed", "policy_version", "prompt")]


def test_a_broken_environment_ends_the_run_and_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = settings_of(tmp_path / "run", environment={"name": f"{GAMES}:Raises"})
    assert main(["train", str(path), "--quiet"]) == 1
    assert "the game is broken" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"name": "nothing"}}, "environment.name = 'nothing' is not known"),
        ({"environment": {"name": f"{GAMES}:add"}}, "cannot be used as the environment"),
        ({"environment": {"name": f"{GAMES}:Retry", "tries": 3}}, "environment.tries is not an option"),
        ({"tool": [{"name": "calculator"}, {"name": "calculator"}]}, "another tool called 'calculator'"),
        ({"tool": [{"name": "search"}]}, "tool[0].corpus is required"),
        ({"rollout": {"name": "single_turn"}}, "[environment] has no effect"),
        ({"rollout": {"name": "conversation", "max_new_tokens": 400, "max_read_tokens": 400}}, "leaves no room"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    import tomli_w

    tables: dict[str, Any] = {
        "run": {"steps": 1, "prompts_per_step": 2, "rollouts_per_prompt": 2, "folder": str(tmp_path / "run")},
        "rollout": {"name": "conversation", "max_new_tokens": 90, "max_read_tokens": 60},
        "environment": {"name": f"{GAMES}:Retry"},
    }
    (tmp_path / "settings.toml").write_text(tomli_w.dumps(tables | changes))
    assert main(["train", str(tmp_path / "settings.toml")]) == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
