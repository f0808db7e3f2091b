"""`podium check`: everything short of training, each part with a plain verdict.

Loads the model, shows the data as the policy will see it, lets the policy answer two prompts, scores the answers with
the run's rewards, and adds up the memory. Writes nothing.
"""

import asyncio
from statistics import median
from typing import Any

from podium.data._order import OrderedData
from podium.evaluation import held_out_groups
from podium.model.load import Policy, load_policy
from podium.records import Group
from podium.reward._scoring import Scoring
from podium.run_folder import RunFolder
from podium.runtime._build import (
    build_advantages,
    build_data,
    build_scoring,
    check_retirement,
    held_out_data,
    make_engine,
    make_rollout,
)
from podium.settings import Settings

SHOWN_PROMPTS = 3
DRY_RUN_PROMPTS = 2


def check(settings: Settings) -> str:
    """The report as text; what is wrong is raised as an `InputError`, as `podium train` would."""
    if settings.run.folder is not None:
        RunFolder(settings.run.folder).refuse_if_used()
    policy = load_policy(settings.model, seed=settings.run.seed)
    data = build_data(settings, settings.data, policy, settings.plan)
    held_out = held_out_data(settings, policy, settings.plan)
    scoring = build_scoring(settings, [data, *([held_out] if held_out else [])])
    check_retirement(settings, scoring, data)
    groups = asyncio.run(_dry_run(settings, policy, data, scoring))
    parts = [
        _section("settings", _settings_lines(settings)),
        _section("data", _data_lines(data, policy.tokenizer)),
        _section("reward dry-run", [line for group in groups for line in _group_lines(group)]),
        _section("memory", _memory_lines(settings, policy, data)),
    ]
    return "\n\n".join(parts) + "\n\nok: `podium train` would start"


async def _dry_run(settings: Settings, policy: Policy, data: OrderedData, scoring: Scoring) -> list[Group]:
    """A few prompts through the real engine and rewards."""
    engine = make_engine(settings, policy, snapshot=False)
    await engine.load_weights(policy.named_weights(), 0)
    rollout = make_rollout(
        settings, engine, policy, settings.rollout.options, settings.run.rollouts_per_prompt, "check"
    )
    groups = await held_out_groups(rollout, scoring.for_evaluation(), data.in_order(DRY_RUN_PROMPTS))
    return build_advantages(settings)(groups)


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _settings_lines(settings: Settings) -> list[str]:
    run, rounds = settings.run, 1 + settings.plan.max_refills
    refilled = f", refilled up to {settings.plan.max_refills} times" if settings.filter.refill else ""
    lines = [
        f"model {settings.model.name}, " + ("LoRA" if settings.model.lora else "full weights"),
        f"{run.steps} steps of {run.prompts_per_step} prompts × {run.rollouts_per_prompt} rollouts{refilled} = "
        f"{run.steps * run.prompts_per_step * run.rollouts_per_prompt * rounds:,} rollouts at most",
    ]
    trainer = settings.trainer.options
    updates = trainer.get("epochs_per_batch", 1) * trainer.get("minibatches_per_step", 1)
    if updates == 1 and settings.loss.old == "auto" and {"clip_low", "clip_high"} & set(settings.loss.options):
        lines.append("note: with one update per batch the ratio is 1 and the clip bounds cannot bind")
    return lines


def _data_lines(data: OrderedData, tokenizer: Any) -> list[str]:
    lengths = data.lengths
    lines = [
        f"{data.num_rows} rows, {data.num_dropped} dropped because the prompt is too long",
        f"prompt tokens: shortest {min(lengths)}, median {median(lengths):.0f}, longest {max(lengths)}",
    ]
    for prompt in data.in_order(SHOWN_PROMPTS):
        lines.append(
            f"row {prompt.ordinal} ({prompt.source}): {tokenizer.decode(prompt.token_ids)!r} → {prompt.answer!r}"
        )
    return lines


def _group_lines(group: Group) -> list[str]:
    lines = [f"{group.prompt.question!r}, expected {group.prompt.answer!r}"]
    for rollout, reward, advantage in zip(group.rollouts, group.rewards, group.advantages, strict=True):
        lines.append(
            f"  reward {reward if reward is None else round(reward, 4)}  advantage {advantage:+.2f}  {rollout.text!r}"
        )
    lines += [f"  failed: {reason} (×{count})" for reason, count in group.reward_failures.items()]
    if not group.has_signal:
        lines.append("  no signal: all rewards are equal, the group would be dropped")
    return lines


def _memory_lines(settings: Settings, policy: Policy, data: OrderedData) -> list[str]:
    """What is held for the whole run; activations come on top."""
    every = list(policy.model.named_parameters())
    weights = sum(p.numel() * p.element_size() for _, p in every)
    trained = sum(p.numel() * p.element_size() for _, p in every if p.requires_grad)
    if policy.peft is not None:
        extra = sum(p.numel() * p.element_size() for name, p in every if ".base_layer.weight" in name)
    else:
        extra = 0 if settings.run.sync_every == 1 else trained
    config: Any = policy.model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * head_dim * policy.model.dtype.itemsize
    rollouts = settings.plan.prompts_per_window * settings.run.rollouts_per_prompt
    slots = min(settings.engine.options.get("concurrency", rollouts), rollouts)
    context = max(data.lengths) + settings.rollout.options.get("max_new_tokens", 0)
    return [
        f"weights {_size(weights)}, of which trained {_size(trained)}",
        f"gradients {_size(trained)}, optimizer {_size(2 * trained)}",
        f"the engine's own copy of weights {_size(extra)}",
        f"key-value cache {_size(per_token * slots * context)} for {slots} rollouts of {context} tokens, prompts too",
    ]


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
