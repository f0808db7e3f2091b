"""Which settings do not go together: one table per moment, each row a condition and the sentence of the error.

A sentence may show values: `{s.run.max_lag}` is that of the settings, `{engines}` lists the engines that a worker can
start. Rows are asked in order; the first that holds is raised as an `InputError`.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from podium.errors import InputError
from podium.settings.contracts import is_users
from podium.settings.lookup import engines_in_workers
from podium.settings.sections import Eval, SeparateReference

if TYPE_CHECKING:
    from podium.settings.tables import Settings

Rule = tuple[Callable[["Settings"], object], str]


def refuse(settings: "Settings", rules: Iterable[Rule]) -> None:
    """Raises `InputError` with the sentence of the first rule whose condition holds."""
    for holds, sentence in rules:
        if holds(settings):
            engines = ", ".join(engines_in_workers()) if "{engines}" in sentence else ""  # asking loads torch
            raise InputError(sentence.format(s=settings, engines=engines))


def changed(settings: "Settings", *keys: str) -> bool:
    """Whether one of these keys of `[eval]` has another value than its default."""
    return any(getattr(settings.eval, key) != Eval.model_fields[key].default for key in keys)


def _trainer(settings: "Settings", key: str, default: Any) -> Any:
    return settings.trainer.options.get(key, default)


def _idle_evaluation() -> Iterable[Rule]:
    for key in ("every", "n", "temperature", "top_k", "top_p"):
        yield (
            lambda s, key=key: not s.eval.data and changed(s, key),
            f"eval.{key} has no effect without an [[eval.data]] table; add one or remove it",
        )
    for key in ("n", "top_k", "top_p"):
        yield (
            lambda s, key=key: s.eval.temperature == 0 and changed(s, key),
            f"eval.{key} has no effect on greedy rollouts; set eval.temperature above 0 or remove it",
        )


SECTIONS: tuple[Rule, ...] = (
    (
        lambda s: s.run.rollouts_per_prompt < 2,
        "run.rollouts_per_prompt = 1: a group of one has no baseline; give 2 or more",
    ),
    (
        lambda s: s.run.max_lag and s.run.sync_every != 1,
        "run.max_lag = {s.run.max_lag} with run.sync_every = {s.run.sync_every}: the async loop syncs after every "
        "step; remove one of them",
    ),
    (
        lambda s: s.run.in_flight and not s.run.max_lag,
        "run.in_flight has no effect with run.max_lag = 0: no rollout is generated while weights change; set max_lag "
        "to 1 or more, or remove it",
    ),
    (lambda s: not s.data, "data: at least one [[data]] table is needed"),
    (
        lambda s: s.model.dtype == "bfloat16" and s.model.lora is False,
        "model.dtype = 'bfloat16' with model.lora = false: bfloat16 weights round small updates away; train full "
        "weights in float32, or set a [model.lora] table",
    ),
    (
        lambda s: s.model.lora is not False and isinstance(s.model.reference, SeparateReference),
        "model.reference.device has no effect under LoRA: the reference is the policy without its adapter and takes no "
        'memory; set model.reference = "initial"',
    ),
    (
        lambda s: s.filter.retire_pass_rate is not None and s.run.epochs == 1,
        "filter.retire_pass_rate has no effect with run.epochs = 1: no row is drawn twice; remove one of them",
    ),
    (
        lambda s: s.loss.kl_beta == 0 and s.model.reference is not None,
        "model.reference has no effect with loss.kl_beta = 0; set one or remove the other",
    ),
    (
        lambda s: s.loss.kl_beta == 0 and s.loss.kl_estimator is not None,
        "loss.kl_estimator has no effect with loss.kl_beta = 0",
    ),
    (
        lambda s: s.loss.kl_beta and s.model.reference is None,
        'loss.kl_beta = {s.loss.kl_beta} needs a reference: set model.reference = "initial" or a table',
    ),
    *_idle_evaluation(),
    *(
        (
            lambda s, key=key: s.rollout.options.get(key) is not None,
            f"rollout.{key} = {{s.rollout.options[{key}]}}: the trainer's logprobs are of the whole distribution, so "
            f"training on a cut one would be wrong in silence; remove it (eval.{key} is fine)",
        )
        for key in ("top_k", "top_p")
    ),
)
"""Before options are looked up."""

OPTIONS: tuple[Rule, ...] = (
    (
        lambda s: s.rollout.options.get("temperature") == 0,
        "rollout.temperature = 0: greedy rollouts of a group are all the same; give a value above 0",
    ),
    (
        lambda s: _trainer(s, "minibatches_per_step", 1) > s.run.prompts_per_step,
        "trainer.minibatches_per_step = {s.trainer.options[minibatches_per_step]}: a step has {s.run.prompts_per_step} "
        "groups and divides none; lower it or raise run.prompts_per_step",
    ),
    (
        lambda s: s.model.dtype == "bfloat16" and _trainer(s, "precision", None) == "float32",
        "trainer.precision = 'float32' with model.dtype = 'bfloat16': products of bfloat16 weights are bfloat16; "
        "remove it, or set model.dtype = 'float32'",
    ),
)
"""After the options of every choice are checked and present."""

RAY: tuple[Rule, ...] = (
    (
        lambda s: isinstance(s.model.reference, SeparateReference) and ":" in s.model.reference.device,
        "model.reference.device = {s.model.reference.device!r}: Ray chooses the GPU; write 'cuda'",
    ),
    (
        lambda s: s.engine.name not in engines_in_workers(),
        "engine.name = {s.engine.name!r} does not go with runtime.name = 'ray', which starts the engines itself; "
        "valid: {engines}",
    ),
    (
        lambda s: s.engine.options.get("sleep"),
        "engine.sleep has no effect: rollout workers have GPUs of their own; remove it",
    ),
    (
        lambda s: isinstance(few := s.runtime.options["rollout_workers"], tuple) and few[0] > few[1],
        "runtime.rollout_workers = [{s.runtime.options[rollout_workers][0]}, {s.runtime.options[rollout_workers][1]}]: "
        "the fewest come first",
    ),
    (
        lambda s: s.runtime.options["linger_s"] is not None and s.runtime.options["address"] is None,
        "runtime.linger_s has no effect: a cluster of the run's own ends with it; remove it",
    ),
    (
        lambda s: s.sync.options.get("root") is not None,
        "sync.root has no effect: weights reach workers through Ray's object store; remove it",
    ),
)
"""With runtime.name = "ray"."""

FLYTE: tuple[Rule, ...] = (
    (
        lambda s: isinstance(s.model.reference, SeparateReference),
        "model.reference.device does not go with runtime.name = 'flyte'; use model.reference = 'initial', which the "
        "trainer's task keeps, or runtime.name = 'local' or 'ray'",
    ),
    (
        lambda s: s.runtime.options["replicas"][0] > s.runtime.options["replicas"][1],
        "runtime.replicas = [{s.runtime.options[replicas][0]}, {s.runtime.options[replicas][1]}]: the fewest are more "
        "than the most",
    ),
    (
        lambda s: not s.engine_traits.runs_in_worker and not is_users(s.engine.name),
        "engine.name = {s.engine.name!r} does not go with runtime.name = 'flyte', whose containers each have an "
        "engine; valid: {engines}",
    ),
    (
        lambda s: s.engine.options.get("sleep"),
        "engine.sleep has no effect with runtime.name = 'flyte': trainer and engine share no GPU",
    ),
    (
        lambda s: s.run.in_flight,
        "run.in_flight does not go with runtime.name = 'flyte': a task has one policy version",
    ),
    (
        lambda s: s.sync.name == "nccl" or s.sync.options.get("root") or s.sync.options.get("scope") == "engine",
        "[sync] has no effect with runtime.name = 'flyte': weights travel in its store; remove it",
    ),
)
"""With runtime.name = "flyte"."""
