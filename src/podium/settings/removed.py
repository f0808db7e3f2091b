"""Options of the first version that are gone, and how the settings of its runs become today's.

A settings file with a removed option is refused with the sentence of its row. A run folder stores every option, so
`of_first_version` drops removed options that have their old default and rewrites those that were merged into others.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from podium.errors import InputError

ANY = object()
"""Old default of options whose value never changed what a run computes."""
NO_LIMIT = 1e30


@dataclass(frozen=True)
class Removed:
    key: str
    """section.key, or section.choice.key for an option of one choice."""
    default: Any
    """Stored runs with this value load; None: only a missing value does."""
    now: str
    """What happens now."""


REMOVED = (
    Removed("run.name", ANY, "the last part of run.folder is the run's name"),
    Removed("run.max_skipped_steps", 50, "Podium always gives up after 50 steps in a row without an update"),
    Removed("run.max_stall_s", 1800.0, "the limit is 1800 s, or 1 s per token of rollout.max_new_tokens if longer"),
    Removed("run.grace_s", 30.0, "Podium always ends 30 s after the signal"),
    Removed("run.max_restarts", 20, "Podium always refuses after 20 failed resumes in a row"),
    Removed(
        "model.exact_sums", "residual", 'Podium always uses "residual"; trainer.precision = "float32" rounds nothing'
    ),
    Removed("model.lora.dropout", 0.0, "adapters have no dropout: the sampler has none, and its noise is a mismatch"),
    Removed("data.arithmetic.operations", "+-", 'set name = "sums" for sums only'),
    Removed("reward.arithmetic.fallback", False, 'set name = "arithmetic_lax"'),
    Removed("scoring.scale", 1.0, "multiply the weights of the [[reward]] tables instead"),
    Removed("scoring.remap", {}, "set remap in the [[data]] table whose rows name the rewards"),
    Removed("scoring.non_stop_penalty", None, "set filter.truncated to the penalty"),
    Removed("scoring.workers", None, "Podium starts up to one reward process per core, as they are needed"),
    Removed(
        "filter.drop_no_signal",
        None,
        'set filter.accept = "all" to train groups without signal; a function there decides alone (group.has_signal)',
    ),
    Removed("filter.max_refills", None, "set filter.refill to the number of rounds"),
    Removed("rollout.max_retries", 2, "Podium always asks the engine 2 more times"),
    Removed("engine.pool.prompts_per_request", ANY, "every rollout is its own request; a member batches those it has"),
    Removed("advantage.grpo.eps", 1e-4, "Podium always adds 1e-4"),
    Removed("advantage.positive_only", False, "set advantage.clip = [0, HIGHEST]"),
    Removed("loss.clip_low", None, "set loss.clip = [LOW, HIGH]"),
    Removed("loss.clip_high", None, "set loss.clip = [LOW, HIGH]"),
    Removed("loss.constant", None, "set loss.average to the length"),
    Removed("loss.kl_in", None, 'set loss.kl_estimator = "in_advantages" for the KL in the advantages'),
    Removed("loss.correction.sequence_band", [0.5, 2.0], "rollouts outside [0.5, 2.0] always get weight 0"),
    Removed("trainer.compile", None, "Podium compiles the layers on CUDA where Triton is installed"),
    Removed("runtime.ray.prompts_per_request", ANY, "every rollout is its own request; a worker batches those it has"),
    Removed("checkpoint.adapter_from", None, "checkpoint.start_from takes LoRA folders too"),
    Removed("eval.pass_at", None, "pass@k is reported for eval.n and every power of two below it"),
    Removed("report.console.mode", ANY, "use --json or --quiet"),
    Removed("report.page.every_s", 2.0, "the page is written every 2 s, of long runs less often"),
)


def refuse_removed(tables: Mapping[str, Any]) -> None:
    """Raises `InputError` for a removed option."""
    for row in REMOVED:
        for where, _, key in _places(tables, row.key):
            raise InputError(f"{where}.{key} was removed: {row.now}")


def of_first_version(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The stored settings of a run, rewritten; settings of today's runs stay as they are."""
    made = copy.deepcopy(dict(tables))
    _merge_loss(made.get("loss", {}))
    _merge_filter(made.get("filter", {}), made.get("scoring", {}))
    _merge_names(made)
    for row in REMOVED:
        for _, table, key in list(_places(made, row.key)):
            if row.default is ANY or (table[key] == row.default and row.default is not None):
                del table[key]
    return made


def _merge_loss(loss: dict[str, Any]) -> None:
    if "clip_low" in loss and "clip_high" in loss and ":" not in loss.get("name", "grpo"):
        loss["clip"] = [loss.pop("clip_low"), loss.pop("clip_high")]
    if loss.get("average") == "constant" and "constant" in loss:
        loss["average"] = loss.pop("constant")
    if (place := loss.pop("kl_in", None)) == "advantage":
        loss["kl_estimator"] = "in_advantages"
    elif place not in ("loss", None):
        loss["kl_in"] = place


def _merge_filter(filtering: dict[str, Any], scoring: dict[str, Any]) -> None:
    if filtering.get("refill") is True and "max_refills" in filtering:
        filtering["refill"] = filtering.pop("max_refills")
    if "accept" not in filtering and "drop_no_signal" in filtering:
        filtering["accept"] = "signal" if filtering.pop("drop_no_signal") else "all"
    elif filtering.get("drop_no_signal") is False:
        del filtering["drop_no_signal"]
    if "non_stop_penalty" in scoring and filtering.get("truncated", "keep") == "keep":
        filtering["truncated"] = scoring.pop("non_stop_penalty")


def _merge_names(tables: dict[str, Any]) -> None:
    checkpoint, advantage = tables.get("checkpoint", {}), tables.get("advantage", {})
    if "adapter_from" in checkpoint:
        checkpoint["start_from"] = checkpoint.pop("adapter_from")
    if advantage.get("positive_only") is True and ":" not in advantage.get("name", "grpo"):
        del advantage["positive_only"]
        advantage["clip"] = [0.0, advantage.get("clip", NO_LIMIT)]
    for _, source, key in list(_places(tables, "data.arithmetic.operations")):
        if source[key] == "+":
            source["name"] = "sums"
            del source[key]
    for _, reward, key in list(_places(tables, "reward.arithmetic.fallback")):
        if reward.pop(key):
            reward["name"] = "arithmetic_lax"


def _places(tables: Mapping[str, Any], dotted: str) -> Iterator[tuple[str, dict[str, Any], str]]:
    """(where, table, key) of each place that the option stands in. Options of user code are the user's business."""
    section, *between, key = dotted.split(".")
    for where, table in _tables_of(tables, section):
        choice = between[0] if between else None
        if choice is not None and isinstance(table.get(choice), dict):
            where, table, choice = f"{where}.{choice}", table[choice], None
        name = table.get("name", choice or "")
        if key in table and choice in (None, name) and (key == "name" or ":" not in str(name)):
            yield where, table, key


def _tables_of(tables: Mapping[str, Any], section: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A section's table, or each of its tables; for data those of evaluation too."""
    given = tables.get(section)
    if isinstance(given, dict):
        yield section, given
    for index, table in enumerate(given if isinstance(given, list) else ()):
        if isinstance(table, dict):
            yield f"{section}[{index}]", table
    held_out = tables.get("eval")
    if section == "data" and isinstance(held_out, dict):
        yield from ((f"eval.{where}", table) for where, table in _tables_of({"data": held_out.get("data")}, "data"))
