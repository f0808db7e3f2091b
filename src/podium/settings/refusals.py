"""Which settings are refused: those that do not go together, and those of the first version that are gone.

`refuse` raises the first sentence that a set of rules yields for the settings. A settings file with a removed option is
refused with the sentence of its row in `REMOVED`. A run folder stores every option, so `of_first_version` drops removed
options that have their old default and rewrites those that were merged into others.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from podium.errors import InputError
from podium.settings.contracts import is_users
from podium.settings.lookup import engines_in_workers
from podium.settings.sections import Eval, SeparateReference

if TYPE_CHECKING:
    from podium.settings.tables import Settings


MOST_ROLLOUTS = 10_000_000
"""Most rollouts at a time; more than any machine could hold is a typing error."""


def refuse(settings: "Settings", rules: "Callable[[Settings], Iterator[str]]") -> None:
    """Raises `InputError` with the first sentence that the rules have against the settings."""
    for sentence in rules(settings):
        raise InputError(sentence)


def of_sections(s: "Settings") -> Iterator[str]:
    """Before options are looked up."""
    if s.run.rollouts_per_prompt < 2:
        yield "run.rollouts_per_prompt = 1: a group of one has no baseline; give 2 or more"
    if s.run.max_lag and s.run.sync_every != 1:
        yield (
            f"run.max_lag = {s.run.max_lag} with run.sync_every = {s.run.sync_every}: the async loop syncs after every "
            "step; remove one of them"
        )
    if s.run.in_flight and not s.run.max_lag:
        yield (
            "run.in_flight has no effect with run.max_lag = 0: no rollout is generated while weights change; set "
            "max_lag to 1 or more, or remove it"
        )
    if not s.data:
        yield "data: at least one [[data]] table is needed"
    if any(choice.name == "jsonl" for choice in s.report):
        yield "report 'jsonl' has no effect: it is always written; remove its table"
    yield from _of_model(s)
    yield from _of_sampling(s)
    yield from _of_amounts(s)


def _of_model(s: "Settings") -> Iterator[str]:
    if s.model.dtype == "bfloat16" and s.model.lora is False:
        yield (
            "model.dtype = 'bfloat16' with model.lora = false: bfloat16 weights round small updates away; train full "
            "weights in float32, or set a [model.lora] table"
        )
    if s.model.lora is not False and isinstance(s.model.reference, SeparateReference):
        yield (
            "model.reference.device has no effect under LoRA: the reference is the policy without its adapter and "
            'takes no memory; set model.reference = "initial"'
        )
    if s.filter.retire_pass_rate is not None and s.run.epochs == 1:
        yield "filter.retire_pass_rate has no effect with run.epochs = 1: no row is drawn twice; remove one of them"
    if s.loss.kl_beta == 0 and s.model.reference is not None:
        yield "model.reference has no effect with loss.kl_beta = 0; set one or remove the other"
    if s.loss.kl_beta == 0 and s.loss.kl_estimator is not None:
        yield "loss.kl_estimator has no effect with loss.kl_beta = 0"
    if s.loss.kl_beta and s.model.reference is None:
        yield f'loss.kl_beta = {s.loss.kl_beta} needs a reference: set model.reference = "initial" or a table'


def _of_sampling(s: "Settings") -> Iterator[str]:
    for key in ("every", "n", "temperature", "top_k", "top_p"):
        if getattr(s.eval, key) == Eval.model_fields[key].default:
            continue
        if not s.eval.data:
            yield f"eval.{key} has no effect without an [[eval.data]] table; add one or remove it"
        if key in ("n", "top_k", "top_p") and s.eval.temperature == 0:
            yield f"eval.{key} has no effect on greedy rollouts; set eval.temperature above 0 or remove it"
    for key in ("top_k", "top_p"):
        if (given := s.rollout.options.get(key)) is not None:
            yield (
                f"rollout.{key} = {given}: the trainer's logprobs are of the whole distribution, so training on a cut "
                f"one would be wrong in silence; remove it (eval.{key} is fine)"
            )


def _of_amounts(s: "Settings") -> Iterator[str]:
    plan = s.plan
    prompts = plan.prompts_ahead if plan.max_lag else min(plan.prompts_ahead, plan.steps * plan.prompts_per_step)
    if (at_once := prompts * plan.rollouts_per_prompt) > MOST_ROLLOUTS:
        yield (
            f"run.prompts_per_step = {plan.prompts_per_step} with rollouts_per_prompt = {plan.rollouts_per_prompt}, "
            f"sync_every = {plan.sync_every} and max_lag = {plan.max_lag} samples {at_once:,} rollouts at a time; at "
            f"most {MOST_ROLLOUTS:,} are possible: lower one of them"
        )
    weighed = [index for index, source in enumerate(s.data) if source.weight is not None]
    for index in weighed:
        if s.data[index].rows is not None:
            yield f"data[{index}].weight and data[{index}].rows both say how much is drawn; remove one"
    if weighed and len(s.data) == 1:
        yield "data[0].weight has no effect on the only table; remove it, or add another [[data]] table"
    for index in range(len(s.data)):
        if weighed and index not in weighed:
            yield f"data[{index}] has no weight and data[{weighed[0]}] has one; give each table one, or none"
    for index, source in enumerate(s.eval.data):
        for key in ("weight", "rows"):
            if getattr(source, key) is not None:
                yield f"eval.data[{index}].{key} has no effect: evaluation takes every row once; max_rows takes fewer"


def of_options(s: "Settings") -> Iterator[str]:
    """After the options of every choice are checked and present."""
    if s.rollout.options.get("temperature") == 0:
        yield "rollout.temperature = 0: greedy rollouts of a group are all the same; give a value above 0"
    if (parts := s.trainer.options.get("minibatches_per_step", 1)) > s.run.prompts_per_step:
        yield (
            f"trainer.minibatches_per_step = {parts}: a step has {s.run.prompts_per_step} groups and divides none; "
            "lower it or raise run.prompts_per_step"
        )
    if s.model.dtype == "bfloat16" and s.trainer.options.get("precision") == "float32":
        yield (
            "trainer.precision = 'float32' with model.dtype = 'bfloat16': products of bfloat16 weights are bfloat16; "
            "remove it, or set model.dtype = 'float32'"
        )


def of_ray(s: "Settings") -> Iterator[str]:
    """With runtime.name = "ray"."""
    if isinstance(s.model.reference, SeparateReference) and ":" in s.model.reference.device:
        yield f"model.reference.device = {s.model.reference.device!r}: Ray chooses the GPU; write 'cuda'"
    if s.engine.name not in (valid := engines_in_workers()):
        yield (
            f"engine.name = {s.engine.name!r} does not go with runtime.name = 'ray', which starts the engines itself; "
            f"valid: {', '.join(valid)}"
        )
    if s.engine.options.get("sleep"):
        yield "engine.sleep has no effect: rollout workers have GPUs of their own; remove it"
    if isinstance(few := s.runtime.options["rollout_workers"], tuple) and few[0] > few[1]:
        yield f"runtime.rollout_workers = [{few[0]}, {few[1]}]: the fewest come first"
    if s.runtime.options["linger_s"] is not None and s.runtime.options["address"] is None:
        yield "runtime.linger_s has no effect: a cluster of the run's own ends with it; remove it"
    if s.sync.options.get("root") is not None:
        yield "sync.root has no effect: weights reach workers through Ray's object store; remove it"


def of_flyte(s: "Settings") -> Iterator[str]:
    """With runtime.name = "flyte"."""
    if isinstance(s.model.reference, SeparateReference):
        yield (
            "model.reference.device does not go with runtime.name = 'flyte'; use model.reference = 'initial', which "
            "the trainer's task keeps, or runtime.name = 'local' or 'ray'"
        )
    few, most = s.runtime.options["replicas"]
    if few > most:
        yield f"runtime.replicas = [{few}, {most}]: the fewest are more than the most"
    if not s.engine_traits.runs_in_worker and not is_users(s.engine.name):
        yield (
            f"engine.name = {s.engine.name!r} does not go with runtime.name = 'flyte', whose containers each have an "
            f"engine; valid: {', '.join(engines_in_workers())}"
        )
    if s.engine.options.get("sleep"):
        yield "engine.sleep has no effect with runtime.name = 'flyte': trainer and engine share no GPU"
    if s.run.in_flight:
        yield "run.in_flight does not go with runtime.name = 'flyte': a task has one policy version"
    if s.sync.name == "nccl" or s.sync.options.get("root") or s.sync.options.get("scope") == "engine":
        yield "[sync] has no effect with runtime.name = 'flyte': weights travel in its store; remove it"


# Options of the first version that are gone

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
    Removed("scoring.workers", ANY, "Podium starts up to one reward process per core, as they are needed"),
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
    Removed("trainer.compile", ANY, "Podium compiles the layers on CUDA where Triton is installed"),
    Removed("runtime.ray.prompts_per_request", ANY, "every rollout is its own request; a worker batches those it has"),
    Removed("checkpoint.adapter_from", None, "checkpoint.start_from takes LoRA folders too"),
    Removed("eval.pass_at", ANY, "pass@k is reported for eval.n and every power of two below it"),
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
