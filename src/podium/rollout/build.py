"""From `[rollout]` and `[eval]` to the rollout stage."""

from functools import partial
from typing import Any, Protocol

from podium.errors import InputError
from podium.rollout._checked import Bounds, checked_groups
from podium.settings.contracts import checked, is_users, signature_of, user_code
from podium.settings.lookup import find
from podium.settings.sections import Eval
from podium.settings.tables import Settings
from podium.stages import Engine, StartRollouts


class PolicyTokens(Protocol):
    """What the rollout stage needs to know of a policy; its weights may be in another process."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def stop_ids(self) -> tuple[int, ...]: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_context_tokens(self) -> int: ...


def make_rollout(
    settings: Settings,
    engine: Engine,
    policy: PolicyTokens,
    options: dict[str, Any],
    rollouts_per_prompt: int,
    purpose: str,
) -> StartRollouts:
    """`start` of the rollout stage; `purpose` keeps the seeds of training, evaluation and checks apart."""
    make, seed = find("rollout", settings.rollout.name), settings.run.seed
    wiring = (engine, policy.tokenizer, policy.stop_ids, policy.vocabulary, rollouts_per_prompt, seed, purpose)
    name = settings.rollout.name
    with user_code("rollout.name", name):
        stage = checked("rollout", name, make(*wiring, **options))
    if not is_users(name):
        return stage.start

    def newest_version() -> int | None:  # weights that change in flight may write before the engine says so
        return None if settings.run.in_flight else engine.policy_version

    return partial(
        checked_groups, stage.start, name, Bounds(policy.vocabulary, policy.max_context_tokens, newest_version)
    )


def make_rollout_for(settings: Settings, engine: Engine, policy: PolicyTokens, purpose: str) -> StartRollouts:
    """The stage as a run has it; `purpose` is "train" or "eval"."""
    if purpose == "eval":
        return make_rollout(settings, engine, policy, eval_options(settings), settings.eval.n, purpose)
    return make_rollout(settings, engine, policy, settings.rollout.options, settings.run.rollouts_per_prompt, purpose)


def eval_options(settings: Settings) -> dict[str, Any]:
    """The rollout's options with the sampling of `[eval]`. A user's own stage may lack some of these options."""
    own = {"temperature": settings.eval.temperature, "top_k": settings.eval.top_k, "top_p": settings.eval.top_p}
    name = settings.rollout.name
    taken = signature_of(f"rollout.name = {name!r}", find("rollout", name)).parameters
    for key, value in own.items():
        if key not in taken and value != Eval.model_fields[key].default:
            raise InputError(
                f"eval.{key} = {value} has no effect: rollout.name = {name!r} has no option {key!r}; "
                "remove it, or give the stage that option"
            )
    return settings.rollout.options | {key: value for key, value in own.items() if key in taken}
