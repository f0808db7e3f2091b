"""G16, D6: every setting has a class for resumes, also those of every choice, and the table names only settings."""

from typing import Any

import pytest
from pydantic import BaseModel

from podium.errors import InputError
from podium.run.build import CLASSES, changes, check_changes, class_of
from podium.settings.lookup import STAGES, choices, find, option_fields
from podium.settings.sections import Choice
from podium.settings.tables import Settings


def every_setting() -> list[str]:
    """Dotted names of all settings: keys of sections and of tables within them, options of all choices."""
    names = []
    for section, field in Settings.model_fields.items():
        model = _model(field.annotation)
        names += [f"{section}.{key}" for key in _keys(model)]
        if issubclass(model, Choice):
            names += [f"{section}.{option}" for option in _options(section)]
    names += [
        f"eval.data.{key}" for key in (*_keys(_model(Settings.model_fields["data"].annotation)), *_options("data"))
    ]
    return sorted(set(names))


def _options(stage: str) -> list[str]:
    return [
        option for name in choices(stage) if not _needs_more(stage, name) for option in option_fields(find(stage, name))
    ]


def _needs_more(stage: str, name: str) -> bool:
    """Choices of optional packages that are not installed here."""
    try:
        find(stage, name)
    except ImportError:
        return True
    return False


def _keys(model: type[BaseModel]) -> list[str]:
    found = []
    for key, field in model.model_fields.items():
        found.append(key)
        for part in getattr(field.annotation, "__args__", (field.annotation,)):
            if isinstance(part, type) and issubclass(part, BaseModel) and not issubclass(part, Choice):
                found += [f"{key}.{inner}" for inner in _keys(part)]
    return found


def _model(annotation: Any) -> type[BaseModel]:
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else annotation.__args__[0]


def test_the_list_of_settings_is_whole() -> None:
    names = every_setting()
    some = {"run.steps", "model.lora.r", "model.reference.alpha", "loss.correction.cap", "loss.clip"}
    assert some | {"trainer.lr", "data.path", "reward.timeout_s", "eval.data.path", "engine.concurrency"} <= set(names)
    assert len(names) > 100


@pytest.mark.parametrize("name", every_setting())
def test_every_setting_has_a_class(name: str) -> None:
    assert class_of(name) in ("free", "warn", "refuse"), f"{name} is new: put it into CLASS_TABLE of run/build.py"


@pytest.mark.parametrize("name", CLASSES)
def test_every_name_of_the_table_is_a_setting(name: str) -> None:
    assert name in every_setting() or name in Settings.model_fields


def test_sections_with_keys_of_their_own_list_each_of_them() -> None:
    """A section as a whole may only stand for the options of choices and for tables within tables."""
    choice_sections = {*STAGES, "eval"}
    assert {name for name in CLASSES if "." not in name} <= choice_sections


def settings(**tables: Any) -> Settings:
    return Settings.from_dict({"reward": [{"name": "arithmetic"}], **tables})


CASES = {
    "free": ({"run": {"steps": 7}}, "run.steps"),
    "free too": ({"eval": {"data": [{"name": "arithmetic"}]}}, "eval.data.0.name"),
    "warn": ({"trainer": {"lr": 1e-3}}, "trainer.lr"),
    "refuse": ({"run": {"seed": 1}}, "run.seed"),
    "refuse a choice": ({"loss": {"name": "dapo"}}, "loss.name"),
    "refuse a table more": ({"data": [{"name": "arithmetic"}, {"name": "arithmetic"}]}, "data.1.name"),
    "refuse a table within": ({"model": {"lora": {"r": 8}}}, "model.lora.r"),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_change_is_let_through_told_or_refused(kind: str) -> None:
    tables, key = CASES[kind]
    before, after = settings(), settings(**tables)
    assert key in changes(before, after)
    if kind.startswith("free"):
        assert check_changes(before, after) == []
    elif kind == "warn":
        [warning] = check_changes(before, after)
        assert warning.startswith("warning: trainer.lr changes from 1e-05 to 0.001")
    else:
        with pytest.raises(InputError, match=rf"{key.partition('.')[0]}\.\S+ cannot change on resume"):
            check_changes(before, after)
        assert check_changes(before, after, [key.partition(".")[0]]) == []


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [20, 8])
def test_a_length_that_a_learning_rate_decays_over_is_refused_with_both_rates(schedule: str, steps: int) -> None:
    trainer = {"schedule": schedule, "lr": 1e-3}
    before, after = (settings(run={"steps": length}, trainer=trainer) for length in (10, steps))
    with pytest.raises(InputError) as caught:
        check_changes(before, after, step=5)
    at_5 = {("linear", 20): "7.5e-04", ("linear", 8): "3.75e-04", ("cosine", 20): "8.54e-04", ("cosine", 8): "3.09e-04"}
    numbers = f"after step 5 from 0.0005 to {float(at_5[schedule, steps]):.3g}"
    assert f"run.steps changes from 10 to {steps} and trainer.schedule = {schedule!r} decays" in str(caught.value)
    assert numbers in str(caught.value)
    assert "--allow-change run.steps" in str(caught.value)
    [warning] = check_changes(before, after, ["run.steps"], step=5)
    assert warning.startswith("warning: run.steps changes")
    assert numbers in warning


def test_so_is_a_number_of_epochs_and_a_constant_rate_has_no_length() -> None:
    linear = {"trainer": {"schedule": "linear"}}
    with pytest.raises(InputError, match=r"run\.epochs changes from 1 to 2 and trainer\.schedule = 'linear' decays"):
        check_changes(settings(run={"epochs": 1}, **linear), settings(run={"epochs": 2}, **linear), step=5)
    with_warmup = {"trainer": {"warmup_steps": 3}}
    assert check_changes(settings(**with_warmup), settings(run={"steps": 7}, **with_warmup), step=5) == []
    [warning] = check_changes(settings(**linear), settings(run={"steps": 7}), step=5)
    assert warning.startswith("warning: trainer.schedule changes from 'linear' to 'constant'")


def test_a_choice_that_may_change_takes_its_options_along() -> None:
    assert check_changes(settings(), settings(loss={"name": "dapo"}), ["loss.name"]) == []


def test_settings_that_are_the_same_have_no_changes() -> None:
    assert changes(settings(), settings()) == {}


def test_another_schedule_does_not_hide_another_length() -> None:
    before = settings(run={"steps": 10}, trainer={"schedule": "linear", "lr": 1e-3})
    cosine, constant = (
        settings(run={"steps": 20}, trainer={"schedule": name, "lr": 1e-3}) for name in ("cosine", "constant")
    )
    with pytest.raises(InputError, match=r"run\.steps changes from 10 to 20.*after step 5 from 0\.0005 to 0\.000854"):
        check_changes(before, cosine, step=5)
    [warning] = check_changes(before, constant, step=5)
    assert "trainer.schedule changes from 'linear' to 'constant'" in warning
    assert warning.endswith("; the learning rate changes after step 5 from 0.0005 to 0.001")
    [warning] = check_changes(constant, before, step=5)
    assert warning.endswith("; the learning rate changes after step 5 from 0.001 to 0.0005")


def test_what_was_accepted_is_a_value_and_not_a_name() -> None:
    before, after = settings(), settings(loss={"clip": 0.3})
    assert check_changes(before, after, accepted={"loss.clip": 0.3}) == []
    for other in ({"loss.clip": 0.4}, {"loss.name": "grpo"}, {"loss": {}}):
        with pytest.raises(InputError, match=r"loss\.clip cannot change on resume"):
            check_changes(before, after, accepted=other)
