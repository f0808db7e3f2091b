"""The tables of a settings file, one class each, with a line on every key.

A `Section` has a fixed set of keys. A `Choice` has a `name` that chooses a file; the keys that are not its own are that
file's options.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from podium.errors import InputError
from podium.loss import Traits, refuse_off_policy, traits_of
from podium.settings.contracts import ModelName, Place, Temperature, TopP, check_call
from podium.settings.lookup import find, option_fields, validate_options


class Section(BaseModel):
    """A table with a fixed set of keys; the text under a key is its help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def key_help(cls) -> list[tuple[str, str, str]]:
        """(key, default, help) of each key, without the name of a choice."""
        return [
            (name, _plain(field.default, field.is_required()), " ".join((field.description or "").split()))
            for name, field in cls.model_fields.items()
            if name != "name" or not issubclass(cls, Choice)
        ]


class Choice(Section):
    """A table whose `name` chooses a file; the other keys are that file's options."""

    model_config = ConfigDict(extra="allow")

    name: str
    """The file (see `podium list`), or `module:object`, or `path.py:object`."""

    @property
    def options(self) -> dict[str, Any]:
        """What is handed to the named thing."""
        return dict(self.model_extra or {})

    def resolved(self, stage: str, where: str) -> "Choice":
        """The same choice with every option checked and present."""
        found = find(stage, self.name)
        if clash := set(option_fields(found, f"{where}.name = {self.name!r}")) & (
            set(type(self).model_fields) - {"name"}
        ):
            raise InputError(
                f"{where}: {self.name} has an option {min(clash)!r}, which is a key of the table; rename it"
            )
        options = validate_options(where, found, self.options)
        check_call(stage, f"{where}.name", self.name, found, options)
        own = {key: getattr(self, key) for key in type(self).model_fields}
        return type(self).model_validate({**own, **options})


class Run(Section):
    folder: Place | None = None
    """Folder of the run; its last part is the run's name in trackers. Default: runs/<time>."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Number of trainer steps."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Ends the run after this many passes over the data, if that comes before `steps`."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of data order, sampling and adapter initialisation."""
    prompts_per_step: Annotated[int, Field(ge=1)] = 16
    """Prompts per trainer step, one group each."""
    rollouts_per_prompt: Annotated[int, Field(ge=1)] = 8
    """Size of a group; at least 2."""
    sync_every: Annotated[int, Field(ge=0)] = 1
    """Steps between two weight updates of the engine; 0: the engine keeps the first weights, for evaluation too."""
    max_lag: Annotated[int, Field(ge=0)] = 0
    """Most policy versions that a trained rollout may be behind the trainer; from 1 on, sampling overlaps training."""
    in_flight: bool = False
    """With max_lag: true sends new weights to the engine during generation; false waits for running rollouts."""


class Lora(Section):
    r: Annotated[int, Field(ge=1)] = 16
    """Rank of the adapter."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """Scale of the adapter's output: alpha / r."""
    targets: str | list[str] = "all-linear"
    """Names of the linear layers that get an adapter; in multimodal models only layers of the text model count."""


class MovingReference(Section):
    alpha: Annotated[float, Field(gt=0, le=1)]
    """Share of the policy in each update of the reference: reference = (1 - alpha) * reference + alpha * policy."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps between two updates of the reference."""


class SeparateReference(Section):
    device: Annotated[str, Field(pattern=r"^(cpu|cuda|cuda:\d+)$")]
    """Device of a separate process that holds the initial model: "cpu", "cuda" or "cuda:1"; for full weights only."""


class Model(Section):
    name: ModelName = "embedded"
    """"embedded", "embedded-tools", "smollm2-135m", a folder or a hub name."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights; bfloat16 needs LoRA, and the adapter stays in float32. auto: bfloat16 for LoRA on a
    GPU, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of trainer and in-process engine; auto: cuda if there is a GPU."""
    lora: Lora | Literal[False] = Lora()
    """Table of the LoRA adapter; false trains every weight."""
    reference: Literal["initial"] | MovingReference | SeparateReference | None = None
    """Reference model of the KL term (loss.kl_beta): "initial", {device = …} for the initial model in a separate
    process, or {alpha = …, every = …} for a copy that follows the policy slowly."""
    trust_remote_code: bool = False
    """Allows Python code that comes with a model to run."""

    @field_validator("lora", mode="before")
    @classmethod
    def _true_is_the_default_table(cls, given: Any) -> Any:
        return {} if given is True else given


class CorrectionSection(Section):
    level: Literal["token", "sequence"] | None = None
    """One weight per token, or one per rollout (geometric mean over its tokens). Default: the level of the loss."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Upper limit of the weights (truncated importance sampling)."""
    band: Annotated[float, Field(gt=1)] | None = None
    """Sets the weight to 0 where the ratio is outside [1/band, band] (IcePop). Default: off."""


class LossSection(Choice):
    name: str = "grpo"
    average: Literal["tokens", "rollouts", "constant"] | Annotated[int, Field(ge=1)] | None = None
    """Average over the step's tokens (default), over rollouts, or over rollouts times a constant length (Dr. GRPO):
    give the length, or "constant" for rollout.max_new_tokens."""
    old: Literal["auto", "rollout"] = "auto"
    """Denominator of the ratio: the policy's logprobs before the update, or the sampler's ("rollout")."""
    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the KL term to `model.reference`."""
    kl_estimator: Literal["k1", "k2", "k3", "k4", "in_advantages"] | None = None
    """KL estimator, default k3; kl and kl1 are k1, kl2 is k2, kl3 is k3. The expected gradient of k1 is 0 on-policy.
    in_advantages: no term in the loss; tokens that drift from the reference get a lower advantage."""
    correction: CorrectionSection | Literal[False] | None = None
    """Table of the correction for the gap between sampler and trainer; on by default if the loss allows it; false:
    off."""

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, given: Any) -> Any:
        names = {"kl": "k1", "kl1": "k1", "kl2": "k2", "kl3": "k3"}
        if isinstance(given, dict) and isinstance(given.get("kl_estimator"), str) and given["kl_estimator"] in names:
            return {**given, "kl_estimator": names[given["kl_estimator"]]}
        return given

    def completed(self, several_updates: str | None, lag: str | None, max_new_tokens: int) -> "LossSection":
        """Every key that has an effect filled in; one that would have none, or contradicts the loss, is refused.

        `several_updates` and `lag` are the settings by which rollouts are trained that another policy wrote.
        """
        traits = traits_of(find("loss", self.name))
        is_corrected = not traits.corrects_itself and self.old == "auto" and self.correction is not False
        refuse_off_policy(self.name, traits, self.options, several_updates, None if is_corrected else lag)
        if lag and self.correction is False and self.old == "auto" and not traits.corrects_itself:
            raise InputError(
                f"loss.correction = false with {lag}: nothing corrects for a sampler that is behind the policy; remove "
                "loss.correction, or set loss.old = 'rollout', whose ratio is against the sampler"
            )
        average = self._average(traits)
        changes: dict[str, Any] = {"average": max_new_tokens if average == "constant" else average}
        changes |= {"correction": self._correction(traits)}
        changes |= {"kl_estimator": self.kl_estimator or "k3"} if self.kl_beta else {}
        return self.model_copy(update=changes)

    def _average(self, traits: Traits) -> str | int:
        if traits.average and self.average not in (None, traits.average):
            raise InputError(
                f"loss.average = {self.average!r}: {self.name} is averaged over {traits.average} by its formula"
            )
        return self.average or traits.average or "tokens"

    def _correction(self, traits: Traits) -> "CorrectionSection | Literal[False]":
        has_room = not traits.corrects_itself and self.old == "auto"
        if isinstance(self.correction, CorrectionSection):
            if not has_room:
                raise InputError(
                    f"loss.correction with loss.name = {self.name!r} and loss.old = {self.old!r}: the ratio is against "
                    "the sampler already, or there is none; remove the table"
                )
            if self.correction.level not in (None, traits.correction_level) and traits.correction_level == "sequence":
                raise InputError(f"loss.correction.level = 'token': {self.name} takes its ratio over whole rollouts")
        if self.correction is False or not has_room:
            return False
        given = self.correction or CorrectionSection()
        return given.model_copy(update={"level": given.level or traits.correction_level})


class DataSource(Choice):
    name: str = "arithmetic"
    max_rows: Annotated[int, Field(ge=1)] | None = None
    """Uses only the first rows."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Drops and counts longer prompts. Default: the model's context minus max_new_tokens."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of this table in the drawn prompts, relative to the weights of the other tables."""
    rows: int | float | None = None
    """Rows per epoch, chosen by run.seed: 500 takes 500 rows, 0.5 half of them, 1.0 all of them, 2.0 each row twice."""

    @field_validator("rows", mode="before")
    @classmethod
    def _rows_are_a_number_or_a_share(cls, given: Any) -> Any:
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if given is not None and (not is_number or not 0 < given < float("inf")):
            raise ValueError("give a number of rows such as 500, or a share such as 0.5 or 2.0")
        if isinstance(given, float) and given > 1000:
            raise ValueError("a share repeats rows at most 1000 times; a number of rows has no decimal point")
        return given


class Tool(Choice):
    """A function that the policy may call in a conversation."""


class Environment(Choice):
    """What answers the policy in a conversation."""

    reward: Literal["sum", "last"] = "sum"
    """Which of the rewards of an episode's steps count."""


class Reward(Choice):
    weight: Annotated[float, Field(ge=-1e30, le=1e30)] | None = None
    """Factor of this reward in the sum. Default: 1."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Time limit of one call in its worker process, in seconds. Default: 10."""
    format: Literal["gate", "add"] | None = None
    """Makes this a format reward, which scores every row in addition to the row's own rewards. "gate": the sum of the
    other rewards counts only where this one has its highest value, else it is 0. "add": added to the sum."""

    def resolved(self, stage: str, where: str) -> "Reward":
        """Rewards that need no worker process have no time limit, and gates no weight."""
        made = super().resolved(stage, where)
        assert isinstance(made, Reward)
        found = find(stage, self.name)
        if getattr(found, "runs_inline", False):
            if self.timeout_s is not None:
                raise InputError(f"{where}.timeout_s has no effect: {self.name} needs no time limit; remove it")
        else:
            made = made.model_copy(update={"timeout_s": self.timeout_s or 10.0})
        if self.format != "gate":
            weight = getattr(found, "weight", 1.0) if self.weight is None else self.weight
            return made.model_copy(update={"weight": weight})
        if self.weight is not None:
            raise InputError(f"{where}.weight has no effect: a gate takes no part in the sum; remove it")
        return made


class Scoring(Section):
    max_failed_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Stops the run if more than this share of a step's rewards failed or abstained."""
    worker_memory_mb: Annotated[int, Field(ge=64)] | None = None
    """Memory limit of a reward process in megabytes, without its imports. Default: 4096."""


DEFAULT_REFILLS = 10


class Filter(Section):
    accept: str = "signal"
    """Which groups are trained. "signal": groups whose rewards differ; without a difference every advantage is 0.
    "all": all groups. module:object or path.py:object: groups for which this function returns True."""
    truncated: Literal["keep", "mask"] | Annotated[float, Field(ge=-1e30, le=1e30)] = "keep"
    """Rollouts cut at max_new_tokens: "keep" trains them, "mask" leaves them out of the loss after the advantages are
    known, a number replaces their reward."""
    refill: bool | Annotated[int, Field(ge=1)] = False
    """Draws further prompts until a step has prompts_per_step groups to train (DAPO's dynamic sampling). A number
    limits the rounds per sync; true: 10."""
    retire_pass_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Rows whose group had at least this share of correct rollouts are not drawn again."""

    @field_validator("accept")
    @classmethod
    def _is_a_rule_or_a_function(cls, given: str) -> str:
        if given not in ("signal", "all") and ":" not in given:
            raise ValueError("give 'signal', 'all', or a function as module:object or path.py:object")
        return given

    @property
    def max_refills(self) -> int:
        """Rounds of refilling; 0: none."""
        return DEFAULT_REFILLS if self.refill is True else int(self.refill)

    @property
    def penalty(self) -> float | None:
        """Reward of a rollout that was cut at max_new_tokens; None: its own."""
        return None if isinstance(self.truncated, str) else self.truncated


class Pack(Section):
    max_tokens_per_batch: Annotated[int, Field(ge=1)] | None = None
    """Tokens per forward pass; affects memory and speed only. Default: what fits into memory, up to the point where
    larger batches are no faster."""
    shared_prefix: bool = False
    """Computes a prompt once for all answers of its group in a batch: faster for long prompts, same result."""


class Eval(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: before the first step and after the last."""
    n: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Rollouts per held-out prompt; from 2 on, pass@k is reported for n and every power of two below it."""
    temperature: Temperature = 0.0
    """Sampling temperature of evaluation; 0: greedy."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """Samples from the k likeliest tokens only. Default: all tokens."""
    top_p: TopP | None = None
    """Samples from the likeliest tokens whose probabilities add up to this. Default: all tokens."""
    data: list[DataSource] = []
    """Held-out sources; without one there is no evaluation."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k. pass@1 is the accuracy, so it is left out."""
        return tuple(
            sorted({2**power for power in range(1, self.n.bit_length()) if 2**power <= self.n} | ({self.n} - {1}))
        )


class CheckpointSection(Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints; 0: one checkpoint, at the end."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Number of checkpoints that stay on disk."""
    start_from: Place | None = None
    """Initial weights: a checkpoint, a run (its newest checkpoint) or a LoRA folder such as a run's final/. The run
    starts at step 0 with a new optimizer."""
    on_checkpoint: str | None = None
    """Shell command run after each checkpoint, with PODIUM_RUN, PODIUM_CHECKPOINT and PODIUM_STEP in its environment.
    The next checkpoint waits for it; a failure is reported and does not stop the run."""


def _plain(default: Any, is_required: bool) -> str:
    if is_required:
        return "required"
    return "a table" if isinstance(default, BaseModel) else "unset" if default is None else repr(default)


SECTIONS: dict[str, type[Section]] = {
    "run": Run,
    "model": Model,
    "model.lora": Lora,
    "data": DataSource,
    "reward": Reward,
    "environment": Environment,
    "scoring": Scoring,
    "filter": Filter,
    "pack": Pack,
    "loss": LossSection,
    "loss.correction": CorrectionSection,
    "checkpoint": CheckpointSection,
    "eval": Eval,
}
"""Sections with keys of their own, for `podium list`."""
