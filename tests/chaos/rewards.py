"""Rewards that are scored in worker processes, in a module without torch: a worker would take seconds to import it."""

from podium.records import Prompt, Rollout
from podium.reward.arithmetic import arithmetic
from podium.reward.scoring.verifiers import declare_range


def in_a_process(prompt: Prompt, rollout: Rollout) -> float:
    """The arithmetic reward, scored in a worker process."""
    return arithmetic(prompt, rollout)


@declare_range(0.0, 1.0)
def even_tokens(prompt: Prompt, rollout: Rollout) -> float:
    """Differs within most groups, whatever is written, so that every step trains."""
    return float(sum(rollout.token_ids) % 2 == 0)
