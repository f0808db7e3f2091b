"""From settings to the parts that every runtime needs: data, rewards, the card of the run."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from podium.data._order import OrderedData
from podium.errors import InputError
from podium.lookup import choices, find, validate_options
from podium.records import Plan, Row
from podium.reward._scoring import NamedReward, Scoring
from podium.settings import DataSource, Settings


def build_data(
    settings: Settings, sources: Sequence[DataSource], tokenizer: Any, max_context_tokens: int, plan: Plan
) -> OrderedData:
    """The rows of all sources, one after the other, then in the run's order."""
    max_new_tokens = settings.rollout.options.get("max_new_tokens", 0)
    fits = max_context_tokens - max_new_tokens
    if fits < 1:
        raise InputError(
            f"rollout.max_new_tokens = {max_new_tokens} leaves no room for a prompt in the context of {max_context_tokens}"
        )
    rows: list[Row] = []
    limits: list[int] = []
    for source in sources:
        some = find("data", source.name)(**source.options)[: source.max_rows]
        rows += [Row(row.messages, row.answer, row.reward, row.source or source.name, row.metadata) for row in some]
        limits += [min(fits, source.max_prompt_tokens or fits)] * len(some)
    return OrderedData(rows, limits, tokenizer, plan, settings.run.seed, settings.rollout.options.get("system"))


def build_scoring(settings: Settings, data: Sequence[OrderedData]) -> Scoring:
    """The settings' rewards, and those that rows name; an unknown name is an error now, not at the first rollout."""
    by_name: dict[str, NamedReward] = {}
    for choice in settings.reward:
        if choice.name in by_name:
            raise InputError(f"reward: {choice.name!r} is given twice; give each reward one table")
        function = bind_options(find("reward", choice.name), choice.options)
        by_name[choice.name] = NamedReward(choice.name, function, choice.weight)
    combinations = {names for source in data for names in source.reward_choices}
    named_by_rows = {name for names in combinations for name in names}
    for name in sorted(named_by_rows - set(by_name)):
        if name not in choices("reward") and ":" not in name:
            raise InputError(f"a row names the reward {name!r}, which is not known; known: {', '.join(choices('reward'))}")
        function = find("reward", name)
        options = validate_options(f"reward {name!r}, named by a row", function, {})
        by_name[name] = NamedReward(name, bind_options(function, options))
    unused = [] if () in combinations else sorted({choice.name for choice in settings.reward} - named_by_rows)
    if unused:
        raise InputError(f"reward {unused[0]!r} has no effect: every row names its own reward; remove one or the other")
    if () in combinations and not settings.reward:
        raise InputError("no reward: add a [[reward]] table, or name one in each row")
    default = [choice.name for choice in settings.reward]
    return Scoring(by_name, default, settings.run.prompts_per_step, settings.scoring.max_failed_share)


def bind_options(function: Any, options: dict[str, Any]) -> Any:
    """The reward with its options bound; the declared range stays on it."""
    bound = partial(function, **options)
    for name in ("min_value", "max_value"):
        if hasattr(function, name):
            setattr(bound, name, getattr(function, name))
    return bound


def run_card(settings: Settings, folder: str, plan: Plan) -> dict[str, Any]:
    """What reports say of a run as a whole."""
    lora = settings.model.lora
    trainer = settings.trainer.options
    facts = {
        "model": settings.model.name,
        "weights": f"LoRA r {lora.r}" if lora else "full",
        "loss": settings.loss.name,
        "prompts/step": plan.prompts_per_step,
        "rollouts/prompt": plan.rollouts_per_prompt,
        "lr": trainer.get("lr"),
        "seed": settings.run.seed,
    }
    title = f"{settings.run.name}: {settings.loss.name} on {settings.model.name}"
    return {"title": title, "folder": folder, "steps": plan.steps, "facts": facts}
