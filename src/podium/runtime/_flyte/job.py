"""What travels between the driver and its tasks: the job, which every task is told, and records as JSON.

Nothing that could be executed, and ids as the engine sampled them.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from podium.errors import InputError
from podium.records import Group, Prompt, Rollout, UpdateResult
from podium.settings import Settings


@dataclass(frozen=True)
class Job:
    run_id: str
    settings: Settings
    steps: int
    """Of the whole run."""
    longest_prompt: int
    """In tokens."""
    probe: tuple[int, ...]
    """Ids whose logprobs prove that an engine holds the trainer's weights."""
    reward_choices: tuple[tuple[str, ...], ...]
    """Every combination of rewards that a row names."""

    def to_text(self) -> str:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(plain | {"settings": self.settings.to_dict()})

    @classmethod
    def from_text(cls, text: str) -> "Job":
        plain = json.loads(text)
        return cls(
            run_id=plain["run_id"],
            settings=Settings.from_dict(plain["settings"]),
            steps=plain["steps"],
            longest_prompt=plain["longest_prompt"],
            probe=tuple(plain["probe"]),
            reward_choices=tuple(map(tuple, plain["reward_choices"])),
        )


def prompts_to_text(prompts: Iterable[Prompt]) -> str:
    """An `InputError` where a prompt holds what JSON would change."""
    return json.dumps([_plain_prompt(prompt) for prompt in prompts])


def prompts_from_text(text: str) -> list[Prompt]:
    return [_prompt(plain) for plain in json.loads(text)]


def groups_to_text(groups: Iterable[Group]) -> str:
    return json.dumps([_plain_group(group) for group in groups])


def groups_from_text(text: str) -> list[Group]:
    return [_group(plain) for plain in json.loads(text)]


def result_to_plain(result: UpdateResult) -> dict[str, Any]:
    logprobs = [[*key, list(values)] for key, values in result.policy_logprobs.items()]
    return {**asdict(replace(result, policy_logprobs={})), "policy_logprobs": logprobs}


def result_from_plain(plain: dict[str, Any]) -> UpdateResult:
    logprobs = {(ordinal, digest): values for ordinal, digest, values in plain["policy_logprobs"]}
    return UpdateResult(**{**plain, "policy_logprobs": logprobs})


def _plain_prompt(prompt: Prompt) -> dict[str, Any]:
    plain = {
        **vars(prompt),
        "messages": [dict(turn) for turn in prompt.messages],
        "token_ids": list(prompt.token_ids),
        "reward": list(prompt.reward),
        "metadata": dict(prompt.metadata),
    }
    try:
        is_plain = json.loads(json.dumps(plain)) == plain
    except (TypeError, ValueError, RecursionError):
        is_plain = False
    if not is_plain:
        raise InputError(
            f"prompt {prompt.ordinal} ({prompt.source or 'data'}): its answer or metadata is not plain data, and tasks "
            "are sent nothing else: use numbers, texts, lists and tables with texts as keys"
        )
    return plain


def _plain_group(group: Group) -> dict[str, Any]:
    return {**vars(group), "prompt": _plain_prompt(group.prompt), "rollouts": [vars(each) for each in group.rollouts]}


def _prompt(plain: dict[str, Any]) -> Prompt:
    return Prompt(**{**plain, **_tuples(plain, ("token_ids", "messages", "reward"))})


def _group(plain: dict[str, Any]) -> Group:
    rollouts = tuple(
        Rollout(**{**each, **_tuples(each, ("token_ids", "rollout_logprobs", "loss_mask"))})
        for each in plain["rollouts"]
    )
    listed = _tuples(plain, ("rewards", "reward_parts", "correct", "advantages"))
    return Group(**{**plain, **listed, "prompt": _prompt(plain["prompt"]), "rollouts": rollouts})


def _tuples(plain: dict[str, Any], names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(plain[name]) for name in names}
