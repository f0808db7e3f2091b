"""Stages of a user's own that have fewer options than Podium's, and what is said where that cannot work."""

from pathlib import Path
from typing import Any

import pytest

from podium.check.verdicts import check
from podium.errors import InputError
from podium.run.start import train
from podium.settings.tables import Settings
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


def settings(**tables: Any) -> Settings:
    return Settings.from_dict({**GOOD, "run": {**GOOD["run"], "folder": "run"}, **tables})


def run(**tables: Any) -> Any:
    return train(settings(**tables))


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
        run(loss={"name": "./mine.py:mine"}, filter={"accept": "all"})


LOSS = """
from dataclasses import replace

from podium.loss.grpo import grpo


def mine(policy, old, batch):
    {before}
    parts = grpo(policy, old, batch)
    {after}
"""
LOSSES = {
    "detached": ("", "return replace(parts, per_token=parts.per_token.detach())", r": per_token has no gradient with"),
    "of another tensor": (
        "",
        "return replace(parts, per_token=parts.per_token.detach().requires_grad_() * 2)",
        ": per_token has no gradient with respect to policy_logprobs",
    ),
    "advantages in place": (
        "batch.advantages.mul_(-1)",
        "return parts",
        r" changed batch\.advantages in place, .*; make a new tensor",
    ),
    "old logprobs in place": ("old.add_(1)", "return parts", r" changed (old|policy)_logprobs in place"),
    "what its gradient needs, in place": (
        "ratio = (policy - old).exp()",
        "per_token = -ratio * 1\n    ratio.mul_(2)\n    return replace(parts, per_token=per_token)",
        r" failed: RuntimeError: .*modified by an inplace operation",
    ),
}


@pytest.mark.parametrize("command", [check, train])
@pytest.mark.parametrize("fault", LOSSES)
def test_a_loss_that_cannot_be_trained_is_told_with_its_name(fault: str, command: Any) -> None:
    before, after, message = LOSSES[fault]
    Path("mine.py").write_text(LOSS.format(before=before, after=after))
    given = settings(loss={"name": "./mine.py:mine"}, filter={"accept": "all"})
    with pytest.raises(InputError, match=rf"^loss\.name = '\./mine\.py:mine'{message}"):
        command(given)


GROUPS = """
from dataclasses import replace

from podium.rollout.single_turn import SingleTurn


class Mine(SingleTurn):
    async def start(self, prompts):
        async for group in super().start(prompts):
            yield {given}
"""
CHANGED = "replace(group, rollouts=tuple(replace(r, {}) for r in group.rollouts))"
FAULTY_GROUPS = {
    "None": ("None", "a NoneType in place of a group"),
    "no rollouts at all": ("replace(group, rollouts=None)", "a group for prompt 0 whose rollouts are a NoneType"),
    "rollouts of None": ("replace(group, rollouts=(None,))", "a group for prompt 0 whose rollout 0 is a NoneType"),
    "another prompt": (
        "replace(group, prompt=replace(group.prompt, ordinal=99))",
        "a group for prompt 99, which was not asked for",
    ),
}
FAULTY_ROLLOUTS = {
    "loss_mask=(1,) * 99": r"has 99 values in loss_mask and \d+ token ids; give one value for each token",
    "loss_mask=(2,) * len(r.token_ids)": "has a loss_mask with other values than 0 and 1",
    "loss_mask=None": "has a field of the wrong type",
    "rollout_logprobs=(-0.5,) * 99": r"has 99 values in rollout_logprobs and \d+ token ids",
    "rollout_logprobs=(float('nan'),) * len(r.token_ids)": "has a value in rollout_logprobs that is no finite number",
    "token_ids=(10**6,) * len(r.token_ids)": "has an id outside the vocabulary",
    "token_ids=tuple(map(float, r.token_ids))": "has token ids that are not whole numbers",
    "**{k: getattr(r, k) * 999 for k in ('token_ids', 'loss_mask', 'rollout_logprobs')}": "has .* more than the mode",
    "text=None": "has a NoneType as its text",
    "finish_reason='done'": "has finish_reason = 'done'; give one of stop, length, turns, abort",
    "policy_version_min=99": "has policy versions 99 to 0 while the engine has version 0",
    "policy_version_max=99": "has policy versions 0 to 99 while the engine has version 0",
}
FAULTY = FAULTY_GROUPS | {
    change: (CHANGED.format(change), f"a group for prompt 0 whose rollout 0 {message}")
    for change, message in FAULTY_ROLLOUTS.items()
}


@pytest.mark.parametrize("fault", FAULTY)
def test_groups_of_a_users_stage_are_checked_where_they_enter(fault: str) -> None:
    given, message = FAULTY[fault]
    Path("mine.py").write_text(GROUPS.format(given=given))
    with pytest.raises(InputError, match=rf"^rollout\.name = '\./mine\.py:Mine' gave {message}"):
        check(settings(rollout={"name": "./mine.py:Mine", "max_new_tokens": 4}))


@pytest.mark.parametrize("max_lag", [0, 1])
def test_both_loops_check_the_groups_of_a_users_stage(max_lag: int) -> None:
    Path("mine.py").write_text(GROUPS.format(given=CHANGED.format("loss_mask=(1,) * 99")))
    given = {**GOOD["run"], "folder": "run", "max_lag": max_lag}
    with pytest.raises(InputError, match=r"^rollout\.name = .* gave a group .* has 99 values in loss_mask"):
        run(run=given, rollout={"name": "./mine.py:Mine", "max_new_tokens": 4})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("async def start(self, prompts):\n        return []", " failed: TypeError: start returned a coroutine; yield"),
        ("async def start(self, prompts):\n        if False:\n            yield", " gave no group for 2 of 2 prompts"),
        ("async def start(self, prompts):\n        yield {}['x']", " failed: KeyError: 'x'"),
    ],
)
def test_a_stage_that_leaves_prompts_out_or_breaks_is_told(body: str, message: str) -> None:
    Path("mine.py").write_text(
        f"from podium.rollout.single_turn import SingleTurn\n\n\nclass Mine(SingleTurn):\n    {body}\n"
    )
    with pytest.raises(InputError, match=rf"^rollout\.name = '\./mine\.py:Mine'{message}"):
        check(settings(rollout={"name": "./mine.py:Mine", "max_new_tokens": 4}))


def test_good_groups_of_a_users_stage_pass_the_check() -> None:
    Path("mine.py").write_text(GROUPS.format(given="group"))
    assert check(settings(rollout={"name": "./mine.py:Mine", "max_new_tokens": 4}))[1]


@pytest.mark.parametrize("command", [check, train])
@pytest.mark.parametrize(
    ("returned", "shown"), [("'yes'", "'yes'"), ("None", "None"), ("1", "1"), ("[True]", "a list")]
)
def test_a_filter_that_gives_no_bool_is_told(returned: str, shown: str, command: Any) -> None:
    Path("mine.py").write_text(f"def mine(group):\n    return {returned}\n")
    given = settings(filter={"accept": "./mine.py:mine"})
    with pytest.raises(InputError, match=rf"^filter\.accept = './mine\.py:mine' returned {shown}; return True or Fal"):
        command(given)


def test_a_filter_that_fails_is_told_by_the_check() -> None:
    Path("mine.py").write_text("def mine(group):\n    return {}['x']\n")
    with pytest.raises(InputError, match=r"^filter\.accept = './mine\.py:mine' failed: KeyError: 'x'"):
        check(settings(filter={"accept": "./mine.py:mine"}))
