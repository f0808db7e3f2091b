"""The tables of a settings file, one class each, with a line on every key.

A `Section` has a fixed set of keys. A `Choice` has a `name` that chooses a file; the keys that are not its own are that
file's options.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from podium.contracts import check_call
from podium.errors import InputError
from podium.lookup import find, option_fields, validate_options
from podium.loss._traits import Traits, refuse_off_policy, traits_of
from podium.names import ModelName, Place, Word
from podium.temperature import Temperature, TopP


class Keys(BaseModel):
    """What sections and choices share: each key's help is the text under it."""

    @classmethod
    def key_help(cls) -> list[tuple[str, str, str]]:
        """(key, default, help) of each key of its own."""
        fields = {name: field for name, field in cls.model_fields.items() if name != "name" or issubclass(cls, Section)}
        return [
            (name, _plain(field.default, field.is_required()), " ".join((field.description or "").split()))
            for name, field in fields.items()
        ]


class Section(Keys):
    """A table with a fixed set of keys; the text under a key is its help."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False)


class Choice(Keys):
    """A table whose `name` chooses a file; the other keys are that file's options."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, allow_inf_nan=False)

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
        return type(self).model_validate({**_own_fields(self), **options})


class Run(Section):
    folder: Place | None = None
    """Where the run is kept; by default runs/<time>-<name>."""
    name: Word = "run"
    """A word for people."""
    steps: Annotated[int, Field(ge=1)] = 100
    """Trainer steps."""
    epochs: Annotated[int, Field(ge=1)] | None = None
    """Ends the run after this many passes over the data, if that is earlier."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Decides data order, sampling and adapter initialisation."""
    prompts_per_step: Annotated[int, Field(ge=1)] = 16
    """Prompts whose groups make one step."""
    rollouts_per_prompt: Annotated[int, Field(ge=1)] = 8
    """Size of a group; at least 2."""
    max_skipped_steps: Annotated[int, Field(ge=1)] = 50
    """Steps without an update in a row after which the run is given up."""
    sync_every: Annotated[int, Field(ge=0)] = 1
    """Steps sampled with one set of weights; 0 keeps the first weights in the engine for ever, evaluation included."""
    max_lag: Annotated[int, Field(ge=0)] = 0
    """Policy versions that a rollout may be behind when it is trained; from 1 on sampling runs ahead of training."""
    in_flight: bool = False
    """With max_lag: new weights reach the engine while rollouts are being written; false: they wait for those."""
    max_stall_s: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds without any progress (a group, a step, a push, a commit) after which the run is given up."""
    grace_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds that a signal leaves the run to end with a commit; then its process ends as it is."""
    max_restarts: Annotated[int, Field(ge=1)] = 20
    """Resumes in a row that ended before a commit, after which another is refused."""


class Lora(Section):
    r: Annotated[int, Field(ge=1)] = 16
    """Rank."""
    alpha: Annotated[float, Field(gt=0)] = 32
    """The adapter is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """On the adapter's input, while training only; its noise then shows in mismatch/*."""
    targets: str | list[str] = "all-linear"
    """Names of the linear layers that get an adapter; of a model for pictures or sound, those of its text model."""


class MovingReference(Section):
    alpha: Annotated[float, Field(gt=0, le=1)]
    """Share of the policy that the reference takes over each time."""
    every: Annotated[int, Field(ge=1)] = 1
    """Steps between two times."""


class SeparateReference(Section):
    device: Annotated[str, Field(pattern=r"^(cpu|cuda|cuda:\d+)$")]
    """Where a process of its own keeps the model as it was: "cpu", "cuda" or "cuda:1"; for full weights."""


class Model(Section):
    name: ModelName = "embedded"
    """"embedded", "smollm2-135m", a folder or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights; bfloat16 only under LoRA, whose adapter stays in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    exact_sums: Literal["residual", "mlp"] = "residual"
    """Whose products are left in float32 under trainer.precision = "bfloat16". residual: the layers that write to the
    residual stream. mlp: gate and up too; the in-process engine and the trainer differ less, for memory and time."""
    lora: Lora | Literal[False] = Lora()
    """The adapter's table, or false to train every weight."""
    reference: Literal["initial"] | MovingReference | SeparateReference | None = None
    """What loss.kl_beta keeps the policy near: the model as it was, beside the policy or in a process of its own, or a
    copy that follows the policy slowly."""
    trust_remote_code: bool = False
    """Whether code that comes with a model may run."""

    @field_validator("lora", mode="before")
    @classmethod
    def _true_is_the_default_table(cls, given: Any) -> Any:
        return {} if given is True else given


class CorrectionSection(Section):
    level: Literal["token", "sequence"] | None = None
    """One weight a token, or one a rollout (geometric mean); by default what the loss is built on."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Weights are truncated here."""
    band: Annotated[float, Field(gt=1)] | None = None
    """Tokens with a ratio outside [1/band, band] get weight 0; by default none."""
    sequence_band: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] | Literal[False] = (0.5, 2.0)
    """Rollouts whose geometric-mean ratio is outside get weight 0; false: none."""

    @field_validator("sequence_band")
    @classmethod
    def _holds_1(cls, band: Any) -> Any:
        if band and not band[0] <= 1 <= band[1]:
            raise ValueError(f"the lower bound is at most 1 and the upper at least 1, not {list(band)}")
        return band


class LossSection(Choice):
    name: str = "grpo"
    average: Literal["tokens", "rollouts", "constant"] | None = None
    """Over the step's tokens (default), over rollouts, or over rollouts times a constant length."""
    constant: Annotated[int, Field(ge=1)] | None = None
    """The length of `average = "constant"`; by default rollout.max_new_tokens."""
    old: Literal["auto", "rollout"] = "auto"
    """Whose logprobs the ratio is against: the policy's before the update, or the sampler's."""
    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the distance to `model.reference`."""
    kl_estimator: Literal["k1", "k2", "k3", "k4"] | None = None
    """By default k3; kl and kl1 stand for k1, kl2 for k2, kl3 for k3. The expected gradient of k1 is 0 on-policy."""
    kl_in: Literal["loss", "advantage"] | None = None
    """A term of the loss (default), or folded into the advantages."""
    correction: CorrectionSection | Literal[False] | None = None
    """For the gap between sampler and trainer: on by default where the loss has room for it; false: off."""

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, given: Any) -> Any:
        names = {"kl": "k1", "kl1": "k1", "kl2": "k2", "kl3": "k3"}
        if isinstance(given, dict) and isinstance(given.get("kl_estimator"), str) and given["kl_estimator"] in names:
            return {**given, "kl_estimator": names[given["kl_estimator"]]}
        return given

    def completed(
        self, has_reference: bool, several_updates: str | None, lag: str | None, max_new_tokens: int
    ) -> "LossSection":
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
        changes: dict[str, Any] = {"average": self._average(traits)}
        if self.constant is not None and changes["average"] != "constant":
            raise InputError('loss.constant has no effect without loss.average = "constant"')
        if changes["average"] == "constant":
            changes["constant"] = self.constant or max_new_tokens
        changes |= self._kl(has_reference) | {"correction": self._correction(traits)}
        return self.model_copy(update=changes)

    def _average(self, traits: Traits) -> str:
        if traits.average and self.average not in (None, traits.average):
            raise InputError(
                f"loss.average = {self.average!r}: {self.name} is averaged over {traits.average} by its formula"
            )
        return self.average or traits.average or "tokens"

    def _kl(self, has_reference: bool) -> dict[str, Any]:
        if self.kl_beta == 0:
            if has_reference:
                raise InputError("model.reference has no effect with loss.kl_beta = 0; set one or remove the other")
            for key in ("kl_estimator", "kl_in"):
                if getattr(self, key) is not None:
                    raise InputError(f"loss.{key} has no effect with loss.kl_beta = 0")
            return {}
        if not has_reference:
            raise InputError(
                f'loss.kl_beta = {self.kl_beta} needs a reference: set model.reference = "initial" or a table'
            )
        if self.kl_in == "advantage" and self.kl_estimator is not None:
            raise InputError('loss.kl_estimator has no effect with loss.kl_in = "advantage"')
        kl_in = self.kl_in or "loss"
        return {"kl_in": kl_in} | ({"kl_estimator": self.kl_estimator or "k3"} if kl_in == "loss" else {})

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
    """Keeps the first rows only."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longer prompts are dropped and counted; by default what the context leaves beside max_new_tokens."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the drawn prompts, beside the weights of the other tables."""
    rows: int | float | None = None
    """Rows of a pass, chosen by run.seed: 500 is so many, 0.5 is half of them, 1.0 all of them, 2.0 each twice."""

    @field_validator("rows", mode="before")
    @classmethod
    def _rows_are_a_number_or_a_share(cls, given: Any) -> Any:
        is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if given is not None and (not is_number or not 0 < given < float("inf")):
            raise ValueError("give a number of rows such as 500, or a share such as 0.5 or 2.0")
        if isinstance(given, float) and given > 1000:
            raise ValueError("a share repeats rows at most 1000 times; a number of rows has no decimal point")
        return given


class Reward(Choice):
    weight: Annotated[float, Field(ge=-1e30, le=1e30)] | None = None
    """Its share in the sum; by default 1."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds that one call may take in its worker process; by default 10."""
    format: Literal["gate", "add"] | None = None
    """Makes it a format reward, which scores every row beside the row's own rewards. "gate": their sum counts only
    where this one has its highest value, else it is 0. "add": it is added to their sum."""

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
    """Above this share of failed or abstained rewards in a step the run stops."""
    scale: Annotated[float, Field(gt=0, le=1e30)] = 1.0
    """Multiplies the sum of a rollout's rewards."""
    remap: dict[str, str] = {}
    """Other names for rewards that rows name: {gsm8k = "math"} scores with math what the rows call gsm8k."""
    non_stop_penalty: Annotated[float, Field(ge=-1e30, le=1e30)] | None = None
    """Takes the place of the reward of a rollout cut at max_new_tokens, after weights, sums and scale."""
    workers: Annotated[int, Field(ge=1)] | None = None
    """Processes that run rewards; by default one a core. They start when they are needed."""
    worker_memory_mb: Annotated[int, Field(ge=64)] | None = None
    """Memory that rewards may take in a process, beyond what their imports took; by default 4096."""


DEFAULT_REFILLS = 10


class Filter(Section):
    drop_no_signal: bool = True
    """Drops groups whose rewards are all equal: their advantages are 0, they only cost time."""
    truncated: Literal["keep", "mask"] = "keep"
    """Rollouts cut at max_new_tokens: trained, or left out after the advantages are known."""
    accept: str | None = None
    """A function of a group that says whether it is trained, as module:object or path.py:object."""
    refill: bool = False
    """Draws further prompts until a step has prompts_per_step groups that are trained (DAPO's dynamic sampling)."""
    max_refills: Annotated[int, Field(ge=1)] | None = None
    """Rounds of refilling per sync_every steps, by default 10; then the step trains what there is."""

    retire_pass_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """A row whose group had at least this share of correct rollouts is not drawn again."""

    def completed(self) -> "Filter":
        """With the default of `max_refills`, where it has an effect."""
        if self.max_refills is not None and not self.refill:
            raise InputError("filter.max_refills has no effect without filter.refill = true; set it or remove this one")
        return self.model_copy(update={"max_refills": self.max_refills or DEFAULT_REFILLS}) if self.refill else self


class Pack(Section):
    max_tokens_per_batch: Annotated[int, Field(ge=1)] | None = None
    """Tokens per forward pass; by default what memory allows, and no more than pays. Changes memory and speed only."""
    shared_prefix: bool = False
    """Computes a prompt once for all answers of its group in a batch; worth it where prompts are long. Same result."""


class Eval(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: before the first step and after the last."""
    n: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Rollouts per held-out prompt."""
    pass_at: list[Annotated[int, Field(ge=1)]] | None = None
    """The k of pass@k, at most n each; by default n where that is above 1."""
    temperature: Temperature = 0.0
    """0 is greedy."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: TopP | None = None
    data: list[DataSource] = []
    """Held-out sources; none: no evaluation."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The k of pass@k that are told; with one rollout a prompt it would be the accuracy again."""
        return tuple(self.pass_at or ([self.n] if self.n > 1 else []))


class CheckpointSection(Section):
    every: Annotated[int, Field(ge=0)] = 10
    """Steps between commits; 0 commits only when the run ends."""
    keep: Annotated[int, Field(ge=1)] = 3
    """How many commits stay on disk."""
    start_from: Place | None = None
    """A checkpoint, or a run whose newest is taken: the run starts at step 0 with its weights alone."""
    adapter_from: Place | None = None
    """A LoRA folder, such as a run's final/: the adapter starts with its weights instead of none."""
    on_checkpoint: str | None = None
    """A shell command run after each commit, with PODIUM_RUN, PODIUM_CHECKPOINT and PODIUM_STEP in its environment;
    the next commit waits for it, and what it fails at is only told."""


def _plain(default: Any, is_required: bool) -> str:
    if is_required:
        return "required"
    return "a table" if isinstance(default, BaseModel) else "unset" if default is None else repr(default)


def _own_fields(choice: Choice) -> dict[str, Any]:
    return {name: getattr(choice, name) for name in type(choice).model_fields}


SECTIONS: dict[str, type[Section] | type[Choice]] = {
    "run": Run,
    "model": Model,
    "model.lora": Lora,
    "data": DataSource,
    "reward": Reward,
    "scoring": Scoring,
    "filter": Filter,
    "pack": Pack,
    "loss": LossSection,
    "loss.correction": CorrectionSection,
    "checkpoint": CheckpointSection,
    "eval": Eval,
}
"""Sections with keys of their own, for `podium list`."""
