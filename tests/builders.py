"""Records for tests, each with defaults for what a test does not care about."""

from typing import Any

from podium.records import Group, Prompt, Rollout, RunState, Span, StepReport, Turn, ids_digest


def make_prompt(ordinal: int = 0, text: str = "What is 1 + 2?", answer: Any = "3", **others: Any) -> Prompt:
    fields = {"token_ids": (1, 65, 4), "messages": ({"role": "user", "content": text},), "source": "arithmetic"}
    return Prompt(ordinal, answer=answer, **(fields | others))


def make_rollout(text: str = "#### 3", token_ids: tuple[int, ...] = (8, 24, 2), **others: Any) -> Rollout:
    fields = {
        "rollout_logprobs": (-0.5,) * len(token_ids),
        "loss_mask": (1,) * len(token_ids),
        "finish_reason": "stop",
        "policy_version_min": 0,
        "policy_version_max": 0,
        "sample_index": 0,
        "seed": 0,
        "digest": ids_digest(token_ids),
    }
    return Rollout(token_ids=token_ids, text=text, **(fields | others))


def make_episode(*texts: str, **others: Any) -> Rollout:
    """Turns of the policy with three tokens each, and between them a message of two tokens."""
    spans, ids, turns, mask = [], [], [], []
    for place, text in enumerate(texts):
        if place:
            turns.append(Turn("user", f"answer {place}", 0.25))
            ids, mask = [*ids, 40, 41], [*mask, 0, 0]
        spans.append(Span(len(ids), 3, seed=place, policy_versions=(place, place), digest=ids_digest((8, 24, 2))))
        turns.append(Turn("assistant", text, 0.5))
        ids, mask = [*ids, 8, 24, 2], [*mask, 1, 1, 1]
    fields = {"loss_mask": tuple(mask), "spans": tuple(spans), "turns": tuple(turns)}
    return make_rollout(texts[-1] if texts else "", tuple(ids), **(fields | others))


def make_group(rewards: tuple[float | None, ...] = (0.2, 1.2), *, prompt: Prompt | None = None, **others: Any) -> Group:
    """A scored group, one rollout a reward; a reward of 1.2 is a correct one."""
    fields = {
        "rollouts": tuple(make_rollout(sample_index=index) for index in range(len(rewards))),
        "reward_parts": tuple({"arithmetic": reward} for reward in rewards),
        "correct": tuple(None if reward is None else reward == 1.2 for reward in rewards),
        "advantages": (0.0,) * len(rewards),
    }
    return Group(prompt or make_prompt(), rewards=rewards, **(fields | others))


def make_step_report(*groups: Group, step: int = 1, **metrics: float) -> StepReport:
    """All groups kept; metrics by name with `__` for the slash."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    made = groups or (make_group(),)
    return StepReport(RunState(step=step), named, made, tuple(group.prompt.ordinal for group in made))
