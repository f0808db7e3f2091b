"""Stages of a user's own that have fewer options than Podium's, and what is said where that cannot work."""

from pathlib import Path
from typing import Any

import pytest

from podium.errors import InputError
from podium.run import train
from podium.settings import Settings
from tests.fuzzed_settings import GOOD

ROLLOUT = '''
from podium.rollout.single_turn import SingleTurn


class Plain(SingleTurn):
    """Without top_k and top_p, and with `temperature` only if it is asked for."""

    def __init__(self, engine, tokenizer, stop_ids, vocabulary, rollouts_per_prompt, seed, purpose{options}):
        super().__init__(engine, tokenizer, stop_ids, vocabulary, rollouts_per_prompt, seed, purpose, max_new_tokens=4)
'''
TRAINER = """
from podium.trainer.single import Single


class Mine(Single):
    def __init__(self, policy, loss, steps, reference, shared_prefix, *, lr: float = 1e-4):
        super().__init__(policy, loss, steps, reference, shared_prefix, lr=lr)
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(**tables: Any) -> Any:
    return train(Settings.from_dict({**GOOD, "run": {**GOOD["run"], "folder": "run"}, **tables}))


@pytest.mark.parametrize("options", ["", ", *, temperature: float = 1.0"])
def test_a_rollout_stage_without_top_k_trains_and_is_evaluated(options: str) -> None:
    Path("mine.py").write_text(ROLLOUT.format(options=options))
    assert run(rollout={"name": "./mine.py:Plain"}).state == "finished"


def test_a_setting_of_the_evaluation_that_the_stage_does_not_take_is_refused() -> None:
    Path("mine.py").write_text(ROLLOUT.format(options=""))
    given = {**GOOD["eval"], "temperature": 1.0, "top_k": 5}
    with pytest.raises(InputError, match=r"eval\.temperature = 1\.0 has no effect: rollout\.name = './mine\.py:Plain'"):
        run(rollout={"name": "./mine.py:Plain"}, eval=given)


def test_a_trainer_without_gradient_checkpointing_trains() -> None:
    Path("mine.py").write_text(TRAINER)
    assert run(trainer={"name": "./mine.py:Mine"}).state == "finished"


def test_a_rollout_stage_with_other_arguments_is_told_which_it_is_called_with() -> None:
    Path("mine.py").write_text("class Mine:\n    def __init__(self, engine): ...\n    def start(self, prompts): ...\n")
    with pytest.raises(InputError, match=r"rollout\.name = .* is called with \(engine, tokenizer, stop_ids, vocab"):
        run(rollout={"name": "./mine.py:Mine"})


def test_an_error_of_a_users_stage_is_told_with_its_place() -> None:
    Path("mine.py").write_text("def rows():\n    return {}['x']\n")
    with pytest.raises(InputError, match=r"data\.name = './mine\.py:rows' failed: KeyError: 'x' \(.*mine\.py:2\)"):
        run(data=[{"name": "./mine.py:rows"}])


def test_a_loss_of_another_shape_is_told() -> None:
    Path("mine.py").write_text(
        "from podium.loss.grpo import grpo\nfrom dataclasses import replace\n\n"
        "def mine(policy, old, batch):\n    parts = grpo(policy, old, batch)\n"
        "    return replace(parts, per_token=parts.per_token.sum())\n"
    )
    with pytest.raises(InputError, match=r"loss\.name = './mine\.py:mine': per_token has the shape \[\] and the logp"):
        run(loss={"name": "./mine.py:mine"}, filter={"drop_no_signal": False})
