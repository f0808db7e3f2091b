"""A run is one TOML file; dotted flags override it.

In sections whose `name` chooses a file (data, rollout, engine, reward, advantage, loss, trainer, sync, report, runtime)
the other keys are that file's options; `resolve` checks them against its signature. Every key lives in one place, and
a key that nothing reads is an error.
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from podium.errors import InputError
from podium.records import EngineTraits, Plan
from podium.settings.lookup import choices, describe, engine_traits, find, refuse_mixed_up, shown
from podium.settings.refusals import of_first_version, of_options, of_sections, refuse, refuse_removed
from podium.settings.sections import (
    CheckpointSection,
    Choice,
    DataSource,
    Environment,
    Eval,
    Filter,
    Lora,
    LossSection,
    Model,
    Pack,
    Reward,
    Run,
    Scoring,
    Section,
    Tool,
)

SECRET_KEY = re.compile(r"(api_?key|password|passwd|secret|access_token|auth_token)$", re.IGNORECASE)
SECRET_URL = re.compile(r"://[^/\s@]*:[^/\s@]+@")
CHOICES = ("rollout", "engine", "advantage", "loss", "trainer", "sync", "runtime")
"""Sections with one table whose `name` chooses a file."""


class Settings(Section):
    """All of a run's settings; `podium show` prints them resolved."""

    run: Run = Run()
    model: Model = Model()
    data: list[DataSource] = Field(default_factory=lambda: [DataSource()])
    rollout: Choice = Choice(name="single_turn")
    tool: list[Tool] = Field(default_factory=list)
    environment: Environment | None = None
    engine: Choice = Choice(name="inprocess")
    reward: list[Reward] = Field(default_factory=list)
    scoring: Scoring = Scoring()
    filter: Filter = Filter()
    advantage: Choice = Choice(name="grpo")
    pack: Pack = Pack()
    loss: LossSection = LossSection()
    trainer: Choice = Choice(name="single")
    sync: Choice = Choice(name="auto")
    checkpoint: CheckpointSection = CheckpointSection()
    eval: Eval = Eval()
    report: list[Choice] = Field(default_factory=lambda: [Choice(name="console"), Choice(name="page")])
    runtime: Choice = Choice(name="local")

    @classmethod
    def from_toml(cls, path: str | Path, overrides: Iterable[str] = ()) -> "Settings":
        """Reads, overrides and resolves; every mistake is an `InputError` before anything starts."""
        return cls.from_dict(override(read_toml(Path(path)), overrides))

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any]) -> "Settings":
        """The same from a nested dict."""
        try:
            made = cls.model_validate(tables)
            refuse_mixed_up(tables, made, "")
            return made.resolve()
        except ValidationError as error:
            raise InputError(_with_choices(cls, error)) from None

    @classmethod
    def stored(cls, text: str) -> "Settings":
        """The same from the settings that a run or a checkpoint stored, which may be of the first version."""
        return cls.from_dict(of_first_version(tomllib.loads(text)))

    @model_validator(mode="before")
    @classmethod
    def _names_filled_in(cls, tables: Any) -> Any:
        """A table that names nothing means the default: `[loss] clip = 0.3` is of grpo."""
        if not isinstance(tables, dict):
            return tables
        _refuse_secrets(tables)
        refuse_removed(tables)
        for section in ("data", "tool", "reward", "report"):
            if isinstance(tables.get(section), dict):
                raise InputError(f"[{section}] must be written [[{section}]]: there may be several, one table each")
        defaults = {section: cls.model_fields[section].default for section in CHOICES}
        return {
            key: {"name": defaults[key].name, **value} if key in defaults and isinstance(value, dict) else value
            for key, value in tables.items()
        }

    @model_validator(mode="after")
    def _sections_agree(self) -> "Settings":
        refuse(self, of_sections)
        return self

    def resolve(self) -> "Settings":
        """Checks every named thing's options against its signature and fills in the defaults."""
        given = {section: getattr(self, section) for section in CHOICES}
        given["sync"] = self._with_channel()
        resolved = {section: choice.resolved(section, section) for section, choice in given.items()}
        if refuse_options := getattr(find("engine", self.engine.name), "refuse", None):
            refuse_options(**resolved["engine"].options)
        trainer = resolved["trainer"].options
        if "lr" in trainer and trainer["lr"] is None:
            trainer["lr"] = 1e-5 if self.model.lora else 1e-6
            resolved["trainer"] = Choice.model_validate({"name": self.trainer.name, **trainer})
        refuse(self.model_copy(update=resolved), of_options)
        model = self.model
        if model.dtype == "auto" and trainer.get("precision") == "float32":
            model = model.model_copy(update={"dtype": "float32"})  # bfloat16 weights are multiplied in bfloat16
        resolved["loss"] = resolved["loss"].completed(
            _several_updates(trainer), _lag(self.run), resolved["rollout"].options.get("max_new_tokens", 1)
        )
        lists: dict[str, Any] = {
            stage: [item.resolved(stage, f"{stage}[{index}]") for index, item in enumerate(getattr(self, stage))]
            for stage in ("data", "tool", "reward", "report")
        }
        if self.environment is not None:
            resolved["environment"] = self.environment.resolved("environment", "environment")
        held_out = [item.resolved("data", f"eval.data[{index}]") for index, item in enumerate(self.eval.data)]
        return self.model_copy(
            update={**resolved, **lists, "model": model, "eval": self.eval.model_copy(update={"data": held_out})}
        )

    def _with_channel(self) -> Choice:
        """`[sync]` with the channel that `auto` stands for; one that cannot reach the engine is refused."""
        reach = getattr(find("runtime", self.runtime.name), "channels", self.engine_traits.channels)
        of_lora = "disk" if self.model.lora else "adapter"
        possible = [name for name in reach if name != of_lora]
        if self.sync.name == "auto":
            return self.sync.model_copy(update={"name": possible[0]})
        if self.sync.name == of_lora:
            raise InputError(f"sync.name = {of_lora!r} is not for {'LoRA' if self.model.lora else 'full weights'}")
        if ":" not in self.sync.name and self.sync.name in choices("sync") and self.sync.name not in possible:
            raise InputError(
                f"sync.name = {self.sync.name!r} does not reach engine {self.engine.name!r}; "
                f"valid: auto, {', '.join(possible)}"
            )
        return self.sync

    @property
    def cautions(self) -> list[str]:
        """What is allowed and seldom meant."""
        found = []
        if self.loss.kl_beta and self.loss.kl_estimator == "k1":
            found.append(
                "loss.kl_estimator = 'k1' keeps nothing near the reference: the expected gradient of this term is 0 "
                "for rollouts of the policy itself, so it only adds noise; take 'k2', 'k3' or 'in_advantages'"
            )
        return found

    @property
    def engine_traits(self) -> EngineTraits:
        """What is known of the engine before it exists."""
        return engine_traits(self.engine.name)

    @property
    def engine_member(self) -> str | None:
        """The engine that a pool starts in each of its processes; None where the engine starts no other."""
        if not self.engine_traits.has_members:
            return None
        options = self.engine.options
        return options.get("of") or (None if options.get("urls") else "inprocess")

    @property
    def plan(self) -> Plan:
        run = self.run.model_dump(exclude={"folder", "seed"})
        return Plan(**run, max_refills=self.filter.max_refills, retire_pass_rate=self.filter.retire_pass_rate)

    @property
    def max_engine_tokens(self) -> int:
        """Tokens of prompt and answer that the engine takes by its own options; a pool has those of its members."""
        options = self.engine.options
        return (options | options.get("member", {})).get("max_context_tokens") or sys.maxsize

    @property
    def max_answer_tokens(self) -> int | None:
        """Most tokens of a rollout after its prompt; None for a user's own stage that does not say."""
        options = self.rollout.options
        written = options.get("max_new_tokens")
        return None if written is None else written + options.get("max_read_tokens", 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is not set is left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        import tomli_w

        return tomli_w.dumps(self.to_dict())


def _several_updates(trainer: Mapping[str, Any]) -> str | None:
    """The setting by which a rollout is trained by a policy that was updated since the step began."""
    keys = ("epochs_per_batch", "minibatches_per_step")
    return next((f"trainer.{key} = {trainer[key]}" for key in keys if trainer.get(key, 1) > 1), None)


def _lag(run: Run) -> str | None:
    """The setting by which the sampler is behind the policy."""
    if run.max_lag:
        return f"run.max_lag = {run.max_lag}"
    return f"run.sync_every = {run.sync_every}" if run.sync_every != 1 else None


def _refuse_secrets(value: Any, path: tuple[str, ...] = ()) -> None:
    """Settings are saved with the run and shown; so they hold the names of secrets, never the secrets themselves."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_secrets(inner, (*path, str(key)))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _refuse_secrets(inner, (*path, str(index)))
    elif isinstance(value, str) and value:
        where = ".".join(path)
        if SECRET_KEY.search(path[-1] if path else ""):
            raise InputError(
                f"{where} looks like a secret, and settings are saved with the run; put it into an environment "
                "variable and give that one's name"
            )
        if SECRET_URL.search(value):
            raise InputError(f"{where} is a URL with a password in it, and settings are saved; take it out")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a settings file."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, not a settings file")
    if not path.is_file():
        raise InputError(f"no settings file {path}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None


def read_run_settings(path: Path) -> dict[str, Any]:
    """The tables that a run stored, which may be one of the first version."""
    return of_first_version(read_toml(path))


def override(tables: dict[str, Any], flags: Iterable[str]) -> dict[str, Any]:
    """Applies `--section.key=value`; `--data.0.key` reaches one of several tables, `--data.key` the only one."""
    for flag in flags:
        key, equals, raw = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not equals or "." not in key:
            fields = Settings.model_fields.items()
            places = [name for name, field in fields if key in getattr(type(field.default), "model_fields", {})]
            hint = f"; did you mean --{places[0]}.{key}?" if places else ""
            raise InputError(f"{shown(repr(flag))} is not an override; write --section.key=value{hint}")
        *path, last = key.split(".")
        place: Any = tables
        for part in path:
            place = _step_into(place, part, flag)
        if isinstance(place, list):
            place = _step_into(place, "0", flag) if len(place) == 1 else _step_into(place, last, flag)
        if not isinstance(place, dict):
            raise InputError(f"{shown(repr(flag))}: {'.'.join(path)} is not a table")
        place[last] = _value(raw)
    return tables


def _step_into(place: Any, part: str, flag: str) -> Any:
    if isinstance(place, list) and len(place) == 1 and not part.isdigit():
        place = place[0]
    if isinstance(place, list):
        if not part.isdigit() or int(part) >= len(place):
            raise InputError(
                f"{shown(repr(flag))}: there are {len(place)} tables; name one by its index, 0 to {len(place) - 1}"
            )
        return place[int(part)]
    if not isinstance(place, dict):
        raise InputError(f"{shown(repr(flag))}: {part!r} is inside a value that is not a table")
    if isinstance(place.get(part), bool) or place.get(part) == []:
        del place[part]  # `lora = false` or `data = []` in the file, `--model.lora.r=8` on the command line
    return place.setdefault(part, [{}] if part in ("data", "tool", "reward", "report") else {})


def _value(raw: str) -> Any:
    """A TOML value where it is one (0.28, true, [1, 2], "text"), else the text itself."""
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw


def _with_choices(model: type[BaseModel], error: ValidationError) -> str:
    """The complaint; for a key that does not exist, also the keys that do."""
    first = error.errors()[0]
    message = describe(error, "").replace("model.lora.Lora", "model.lora")
    if first["type"] != "extra_forbidden":
        return message
    for part in first["loc"][:-1]:
        field = model.model_fields.get(str(part))
        inner = field.annotation if field else None
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
        elif part == "lora":
            model = Lora
    where = ".".join(str(part) for part in first["loc"] if part not in ("Lora", "literal[False]"))
    return f"{shown(where) or repr(where)} is not a setting; valid here: {', '.join(sorted(model.model_fields))}"
