"""What the environment of a conversation gave: the default reward of a run with `[environment]`."""

from podium.records import Prompt, Rollout
from podium.reward.scoring.verifiers import gold_answer, runs_inline


@runs_inline
@gold_answer("the environment scores what happens in it, not an answer")
def environment(prompt: Prompt, rollout: Rollout) -> float | None:
    """The sum of the steps' rewards, or the last one, as `environment.reward` says; None without an environment."""
    return rollout.environment_reward
