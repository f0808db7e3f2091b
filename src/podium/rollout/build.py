"""From `[rollout]` and `[eval]` to the rollout stage. The groups of a user's own stage are checked where they enter the
run; errors name the setting."""

import math
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import aclosing, nullcontext
from functools import partial
from numbers import Integral
from typing import Any, Protocol, get_args

from podium.environment.build import build_playground
from podium.errors import InputError
from podium.records import FinishReason, Group, Prompt, Rollout
from podium.settings.contracts import checked, is_users, signature_of, user_code
from podium.settings.lookup import find
from podium.settings.sections import Eval
from podium.settings.tables import Settings
from podium.stages import Engine, Rollouts

END: Any = object()


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


def make_rollout_for(
    settings: Settings, engine: Engine, policy: PolicyTokens, purpose: str, rollouts_per_prompt: int | None = None
) -> Rollouts:
    """The rollout stage; `purpose`, such as "train" or "eval", keeps the seeds of training, evaluation and
    checks apart. `rollouts_per_prompt` is by default that of the purpose."""
    name, is_eval = settings.rollout.name, purpose == "eval"
    count = rollouts_per_prompt or (settings.eval.n if is_eval else settings.run.rollouts_per_prompt)
    options = eval_options(settings) if is_eval else settings.rollout.options
    wiring = (engine, policy.tokenizer, policy.stop_ids, policy.vocabulary, count, settings.run.seed, purpose)
    handed, make = {}, find("rollout", name)
    if "playground" in signature_of(f"rollout.name = {name!r}", make).parameters:
        handed["playground"] = build_playground(settings, policy.tokenizer)
    elif settings.tool or settings.environment:
        given = "[[tool]]" if settings.tool else "[environment]"
        raise InputError(f"{given} has no effect with rollout.name = {name!r}; use rollout.name = 'conversation'")
    with user_code("rollout.name", name):
        stage = checked("rollout", name, make(*wiring, **handed, **options))
    close = getattr(stage, "close", lambda: None)
    if not is_users(name):
        return Rollouts(stage.start, close)

    def newest_version() -> int | None:  # weights that change in flight may write before the engine says so
        return None if settings.run.in_flight else engine.policy_version

    return Rollouts(partial(checked_groups, stage.start, name, policy, newest_version), close)


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


async def checked_groups(
    start: Callable[[Sequence[Prompt]], Any],
    name: str,
    policy: PolicyTokens,
    newest_version: Callable[[], int | None],
    prompts: Sequence[Prompt],
) -> AsyncIterator[Group]:
    """The groups that `start` of the rollout stage called `name` gives for the prompts, each checked as it arrives.
    `newest_version` is that of the engine's weights now; None where it is not known."""
    owed = {prompt.ordinal for prompt in prompts}
    with user_code("rollout.name", name):
        groups = start(prompts)
        if not hasattr(groups, "__anext__"):
            if hasattr(groups, "close"):
                groups.close()  # a coroutine, which nothing will wait for
            raise TypeError(f"start returned a {type(groups).__name__}; yield each group from an 'async def'")
    async with aclosing(groups) if hasattr(groups, "aclose") else nullcontext():
        while True:
            with user_code("rollout.name", name):
                group = await anext(groups, END)
            if group is END:
                break
            if fault := group_fault(group, owed, policy, newest_version()):
                raise InputError(f"rollout.name = {name!r} gave {fault}")
            owed.discard(group.prompt.ordinal)
            yield group
    if owed:
        raise InputError(
            f"rollout.name = {name!r} gave no group for {len(owed)} of {len(prompts)} prompts, such as "
            f"{min(owed)}; give one for each prompt, without rollouts where it has none"
        )


def group_fault(group: Any, owed: Collection[int], policy: PolicyTokens, newest: int | None) -> str | None:
    """What is wrong with a group, and what to give instead; `owed` are the ordinals that wait for one, `newest` is the
    engine's version."""
    if not isinstance(group, Group):
        return f"a {type(group).__name__} in place of a group; give podium.records.Group"
    where = f"a group for prompt {group.prompt.ordinal}"
    if group.prompt.ordinal not in owed:
        return f"{where}, which was not asked for or has come before; give one group for each prompt"
    if not isinstance(group.rollouts, tuple | list):
        return f"{where} whose rollouts are a {type(group.rollouts).__name__}; give a tuple"
    for number, rollout in enumerate(group.rollouts):
        try:
            if not isinstance(rollout, Rollout):
                fault = f"is a {type(rollout).__name__}; give podium.records.Rollout"
            else:
                fault = _token_fault(rollout, len(group.prompt.token_ids), policy) or _answer_fault(rollout, newest)
        except TypeError as error:  # None in place of numbers
            fault = f"has a field of the wrong type: {error}"
        if fault:
            return f"{where} whose rollout {number} {fault}"
    return None


def _token_fault(rollout: Rollout, prompt_tokens: int, policy: PolicyTokens) -> str | None:
    """What it has of each token."""
    ids = rollout.token_ids
    lengths = {"loss_mask": len(rollout.loss_mask), "rollout_logprobs": len(rollout.rollout_logprobs)}
    for name, length in lengths.items():
        if length != len(ids):
            return f"has {length} values in {name} and {len(ids)} token ids; give one value for each token"
    if not all(issubclass(kind, Integral) for kind in set(map(type, ids))):
        return f"has token ids that are not whole numbers, such as {ids[0]!r}; give a tuple of int"
    if ids and not (min(ids) >= 0 and max(ids) < policy.vocabulary):
        return f"has an id outside the vocabulary of {policy.vocabulary}; give ids that the model knows"
    if prompt_tokens + len(ids) > policy.max_context_tokens:
        return (
            f"has {len(ids)} tokens after a prompt of {prompt_tokens}, more than the model's context of "
            f"{policy.max_context_tokens}; end it before"
        )
    if not set(rollout.loss_mask) <= {0, 1}:
        return "has a loss_mask with other values than 0 and 1; give 1 where the policy wrote the token"
    if not all(math.isfinite(value) and value <= 1e-6 for value in rollout.rollout_logprobs):
        return "has a value in rollout_logprobs that is no finite number of at most 0; give the sampler's logprobs"
    return None


def _answer_fault(rollout: Rollout, newest: int | None) -> str | None:
    """What it has once; `newest` is the engine's version."""
    first, last = rollout.policy_version_min, rollout.policy_version_max
    if not isinstance(rollout.text, str):
        return f"has a {type(rollout.text).__name__} as its text; give the decoded answer"
    if rollout.finish_reason not in get_args(FinishReason):
        return f"has finish_reason = {rollout.finish_reason!r}; give one of {', '.join(get_args(FinishReason))}"
    if not 0 <= first <= last or (newest is not None and last > newest):
        held = "" if newest is None else f" while the engine has version {newest}"
        return f"has policy versions {first} to {last}{held}; take those of the engine's answers"
    return None
