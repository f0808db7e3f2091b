"""Few options, a sentence for each that is gone, and runs of the first version still load."""

import copy
from typing import Any

import pytest

from podium.errors import InputError
from podium.settings.refusals import ANY, REMOVED, Removed, of_first_version
from podium.settings.tables import Settings
from tools.settings_page import all_options, default_path

FIRST: dict[str, Any] = {
    "run": {
        "name": "mine",
        "steps": 3,
        "max_skipped_steps": 50,
        "max_stall_s": 1800.0,
        "grace_s": 30.0,
        "max_restarts": 20,
    },
    "model": {"exact_sums": "residual", "lora": {"r": 8, "dropout": 0.0}, "reference": "initial"},
    "data": [{"name": "arithmetic", "split": "train", "operations": "+"}],
    "eval": {"temperature": 1.0, "data": [{"name": "arithmetic", "split": "held_out", "operations": "+-"}]},
    "rollout": {"name": "single_turn", "max_new_tokens": 24, "max_retries": 2},
    "reward": [{"name": "arithmetic", "weight": 1.0, "fallback": True, "thinking": "ignore"}],
    "scoring": {"max_failed_share": 0.1, "scale": 1.0, "remap": {}, "non_stop_penalty": -1.0},
    "filter": {"drop_no_signal": False, "truncated": "keep", "refill": True, "max_refills": 4},
    "advantage": {"name": "grpo", "std": "none", "eps": 1e-4, "positive_only": True, "clip": 3.0},
    "loss": {
        "name": "dapo",
        "clip_low": 0.2,
        "clip_high": 0.3,
        "average": "constant",
        "constant": 7,
        "kl_beta": 0.1,
        "kl_in": "advantage",
        "correction": {"level": "token", "cap": 2.0, "sequence_band": [0.5, 2.0]},
    },
    "checkpoint": {"every": 10, "keep": 3, "adapter_from": "runs/first/final"},
    "report": [{"name": "console", "mode": "quiet"}, {"name": "page", "every_s": 2.0}],
}


def test_a_default_run_has_at_most_70_options() -> None:
    assert len(default_path()) == len(set(default_path()))
    assert len(default_path()) <= 70
    assert set(default_path()) <= set(all_options())


def test_no_removed_option_is_there_any_more() -> None:
    assert not {row.key for row in REMOVED} & set(all_options())


def given(row: Removed, value: Any) -> dict[str, Any]:
    """Settings with this option, in the table that it belongs to."""
    section, *between, key = row.key.split(".")
    if section in ("data", "reward", "report"):
        return {section: [{"name": between[0], key: value}]}
    if between and between[0] in ("lora", "correction"):
        return {section: {between[0]: {key: value}}}
    if between:
        return {section: {"name": between[0], key: value}}
    return {section: {key: value}}


@pytest.mark.parametrize("row", REMOVED, ids=lambda row: row.key)
def test_a_removed_option_is_refused_with_what_happens_now(row: Removed) -> None:
    with pytest.raises(InputError) as refused:
        Settings.from_dict(given(row, 1))
    key = row.key.rpartition(".")[2]
    assert f".{key} was removed: {row.now}" in str(refused.value)


def test_an_option_of_the_users_own_code_may_have_the_name_of_a_removed_one() -> None:
    tables = {"loss": {"name": "mine.py:loss", "clip_low": 0.1}}
    assert of_first_version(tables) == tables


def test_a_run_of_the_first_version_loads_as_what_it_was() -> None:
    made = Settings.from_dict(of_first_version(FIRST))
    assert (made.data[0].name, made.eval.data[0].name, made.reward[0].name) == ("sums", "arithmetic", "arithmetic_lax")
    assert made.loss.options["clip"] == (0.2, 0.3)
    assert (made.loss.average, made.loss.kl_estimator) == (7, "in_advantages")
    assert (made.filter.accept, made.filter.refill, made.filter.truncated) == ("all", 4, -1.0)
    assert made.advantage.options["clip"] == (0.0, 3.0)
    assert str(made.checkpoint.start_from) == "runs/first/final"
    assert Settings.from_dict(of_first_version(made.to_dict())) == made


@pytest.mark.parametrize("row", [row for row in REMOVED if row.default is ANY], ids=lambda row: row.key)
def test_a_stored_option_that_never_changed_a_result_is_dropped_whatever_its_value(row: Removed) -> None:
    assert "any value" not in str(Settings.from_dict(of_first_version(given(row, "any value"))).to_dict())


@pytest.mark.parametrize("row", [row for row in REMOVED if row.default not in (ANY, None)], ids=lambda row: row.key)
def test_a_stored_option_loads_at_its_default_and_is_refused_at_another_value(row: Removed) -> None:
    Settings.from_dict(of_first_version(given(row, copy.deepcopy(row.default))))
    another = "-" if row.key.endswith("operations") else {"gsm8k": "math"} if row.default == {} else 7.5
    if row.key in ("reward.arithmetic.fallback", "advantage.positive_only"):
        return  # rewritten, see above
    with pytest.raises(InputError, match="was removed"):
        Settings.from_dict(of_first_version(given(row, another)))
