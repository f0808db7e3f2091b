from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from podium.errors import InputError
from podium.settings.lookup import STAGES, choices, find, option_fields, option_help, validate_options


def sample(
    first: int,
    second: str = "handed in",
    *,
    rate: Annotated[float, Field(gt=0, description="how fast")],
    kind: Literal["one", "two"] = "one",
    names: list[str] | None = None,
    anything=None,
) -> None:
    """Two arguments that the runtime hands in, four options."""


class Sample:
    def __init__(self, handed_in: int, *, size: int = 3) -> None:
        """A class has the options of its constructor."""


@pytest.mark.parametrize("stage", STAGES)
def test_every_file_of_a_stage_holds_the_thing_that_it_is_named_after(stage: str) -> None:
    assert choices(stage)
    for name in choices(stage):
        thing = find(stage, name)
        assert thing.__module__ == f"podium.{stage}.{name}"
        assert thing.__name__.lower().replace("_", "") == name.replace("_", "")


def test_sub_folders_and_files_with_an_underscore_are_no_choices() -> None:
    assert {"arithmetic", "exact"} <= set(choices("reward"))
    assert not {"scoring", "sandbox", "isolation"} & set(choices("reward"))
    assert choices("sync") == ["adapter", "disk", "nccl", "shared"]
    assert choices("report") == ["console", "mlflow", "page", "tensorboard", "trackio", "wandb"]


def test_an_unknown_name_is_refused_with_the_nearest_and_all_that_there_are() -> None:
    with pytest.raises(InputError) as caught:
        find("reward", "arithmetics")
    assert str(caught.value) == (
        "reward.name = 'arithmetics' is not known; did you mean 'arithmetic'? "
        f"Valid: {', '.join(choices('reward'))}, or a 'module:object'"
    )
    with pytest.raises(InputError, match=r"is not known; Valid: answer_tag, arithmetic, arithmetic_lax, code"):
        find("reward", "zzz")


@pytest.mark.parametrize("name", ["scoring", "scoring.stage", "__init__", "", "../reward/exact", "reward.exact"])
def test_what_is_no_choice_cannot_be_reached_by_name(name: str) -> None:
    with pytest.raises(InputError, match="is not known"):
        find("reward", name)


def test_user_code_is_found_in_a_module() -> None:
    assert find("reward", "tests.test_lookup:sample") is sample
    assert find("engine", "tests.test_lookup:Sample") is Sample


def test_user_code_is_found_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text("def half(prompt, rollout, *, scale: float = 0.5):\n    return scale\n")
    half = find("reward", f"{tmp_path}/my_rewards.py:half")
    assert half(None, None) == 0.5
    assert validate_options("reward[0]", half, {"scale": 2}) == {"scale": 2.0}
    monkeypatch.chdir(tmp_path)
    assert find("reward", "./my_rewards.py:half")(None, None, scale=3.0) == 3.0


def test_user_code_is_found_in_a_module_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "podium_test_module.py").write_text("def two(prompt, rollout):\n    return 2.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert find("reward", "podium_test_module:two")(None, None) == 2.0


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no_such_module:thing", " cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("no/such/file.py:thing", " cannot be imported: ModuleNotFoundError: no file no/such/file.py"),
        (":thing", " names no object; give module:object or path.py:object"),
        ("tests.test_lookup:missing", ": tests.test_lookup has no such function or class"),
        ("tests.test_lookup:STAGES", ": tests.test_lookup has no such function or class"),
        ("tests.test_lookup:", " names no object; give module:object or path.py:object"),
    ],
)
def test_user_code_that_is_not_there_is_an_input_error(name: str, complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        find("loss", name)
    assert str(caught.value).startswith(f"loss.name = {name!r}{complaint}")


def test_user_code_that_breaks_on_import_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def (:\n")
    with pytest.raises(InputError, match="cannot be imported: SyntaxError"):
        find("loss", f"{tmp_path / 'broken.py'}:thing")


def test_options_are_the_keyword_only_arguments() -> None:
    fields = option_fields(sample)
    assert list(fields) == ["rate", "kind", "names", "anything"]
    assert fields["rate"][1] is ...
    assert fields["kind"] == (Literal["one", "two"], "one")
    assert fields["anything"] == (Any, None)
    assert list(option_fields(Sample)) == ["size"]


def test_options_are_checked_and_the_others_get_their_defaults() -> None:
    assert validate_options("x", sample, {"rate": 1}) == {"rate": 1.0, "kind": "one", "names": None, "anything": None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rte": 1}, "loss.rte is not an option of sample; did you mean 'rate'? Valid: anything, kind, names, rate"),
        ({"rate": 1, "zzz": 1}, "loss.zzz is not an option of sample; Valid: anything, kind, names, rate"),
        ({"rate": 1, "first": 1}, "loss.first is not an option of sample; Valid: anything, kind, names, rate"),
        ({}, "loss.rate is required"),
        ({"rate": 0}, "loss.rate = 0: input should be greater than 0"),
        ({"rate": "x"}, "loss.rate = 'x': input should be a valid number, unable to parse string as a number"),
        ({"rate": float("inf")}, "loss.rate = inf: input should be a finite number"),
        ({"rate": 1, "kind": "six"}, "loss.kind = 'six': input should be 'one' or 'two'"),
        ({"rate": 1, "names": [1]}, "loss.names.0 = 1: input should be a valid string"),
    ],
)
def test_a_bad_option_is_named_with_what_was_expected(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        validate_options("loss", sample, given)
    assert str(caught.value) == message


def test_a_thing_without_options_says_that_there_are_none() -> None:
    with pytest.raises(InputError, match="Valid: none"):
        validate_options("sync", find("sync", "shared"), {"weigth": 1})


def test_help_has_name_default_and_description() -> None:
    assert option_help(sample) == [
        ("rate", "required", "how fast"),
        ("kind", "'one'", ""),
        ("names", "None", ""),
        ("anything", "None", ""),
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_every_option_has_a_type(stage: str) -> None:
    for name in choices(stage):
        for option, (annotation, _) in option_fields(find(stage, name)).items():
            assert annotation is not Any, f"{stage}/{name}.py: {option}"
