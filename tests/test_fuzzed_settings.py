"""A thousand settings that nobody should write: each is taken, or refused in one message that names the field.

What `podium check` calls ok is trained for two steps: it starts, and ends without a traceback.
"""

import copy
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from podium.check.verdicts import check
from podium.errors import InputError, PodiumError, RewardContractError, StalledError
from podium.run.start import train
from podium.settings.tables import Settings, override
from tests.fuzzed_settings import GOOD, VALUES, cases, places

CASES, CHECKED, TRAINED = 1000, 30, 5
MAX_MESSAGE = 2000
pytestmark = pytest.mark.filterwarnings("ignore")
"""A loss of the fuzz may well divide by 0."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the names are paths."""
    monkeypatch.chdir(tmp_path)


def is_slow(settings: Settings) -> bool:
    """Starts other processes or looks for machines: tested elsewhere."""
    return (settings.engine.name, settings.runtime.name) != ("inprocess", "local") or settings.runtime.options[
        "ranks"
    ] > 1


def check_message(error: PodiumError, changed: list[tuple[str, ...]]) -> None:
    message = str(error)
    assert message.strip()
    assert len(message) < MAX_MESSAGE, message[:200]
    parts = {part for place in changed for part in place}
    assert any(part[:100] in message for part in parts), (changed, message)


def test_a_thousand_settings_give_no_traceback() -> None:
    loaded = []
    for changed, tables in cases(seed=21, count=CASES):
        try:
            loaded.append((changed, Settings.from_dict(tables)))
        except InputError as error:  # anything else fails the test, with its traceback
            check_message(error, changed)
    assert 20 < len(loaded) < CASES / 2
    quick = [(changed, settings) for changed, settings in loaded if not is_slow(settings)]
    trained = 0
    for changed, settings in random.Random(0).sample(quick, min(CHECKED, len(quick))):
        try:
            report, is_good = check(settings)
        except PodiumError as error:
            check_message(error, changed)
            continue
        if is_good and trained < TRAINED and settings.run.steps <= 2 and "is your own" not in report:
            trained += 1
            starts(settings, Path(f"run-{trained}"))
    assert trained == TRAINED


def starts(settings: Settings, folder: Path) -> None:
    """A run that finishes, or ends in words."""
    section = settings.run.model_copy(update={"folder": folder})
    with suppress(RewardContractError, StalledError):  # an InputError would be one that `check` had not seen
        train(settings.model_copy(update={"run": section}))
    assert (folder / "settings.toml").is_file()


def test_a_thousand_overrides_give_no_traceback() -> None:
    rng, every, messages = random.Random(4), [place for place in places() if all(place)], []
    for _ in range(CASES):
        place, value = rng.choice(every), rng.choice(VALUES)
        text = value if isinstance(value, str) else repr(value)
        flag = rng.choice((f"--{'.'.join(place)}={text}", f"--{'.'.join(place)}", f"--{place[0]}={text}", text))
        try:
            Settings.from_dict(override(copy.deepcopy(GOOD), [flag]))
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > CASES / 2
    assert all(message.strip() and len(message) < MAX_MESSAGE for message in messages)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"loss": {"kl_estimator": ["k1"]}}, r"loss\.kl_estimator = \['k1'\]: input should be 'k1'"),
        (
            {"loss": {"name": "math:sqrt"}},
            r"loss\.name = 'math:sqrt' cannot be used as the loss: .*\(policy_logprobs, old_log",
        ),
        ({"runtime": {"name": "math:sqrt"}}, r"runtime\.name = 'math:sqrt' cannot be used as the runtime"),
        ({"sync": {"name": "math:sqrt"}}, "sync.name = 'math:sqrt' cannot be used as the sync"),
        ({"sync": {"name": "builtins:list"}}, "sync.name = 'builtins:list'"),
        ({"rollout": {"name": "math:sqrt"}}, "rollout.name = 'math:sqrt' cannot be used as the rollout"),
        ({"engine": {"name": "pathlib:Path"}}, "engine.name = 'pathlib:Path', which cannot be used as the engine"),
        ({"trainer": {"name": "math:sqrt"}}, "trainer.name = 'math:sqrt' cannot be used as the trainer"),
        ({"reward": [{"name": "math:sqrt"}]}, r"reward\[0\]\.name = 'math:sqrt' cannot be used as the reward"),
        (
            {"report": [{"name": "fractions:Fraction"}]},
            r"report\[0\]\.name = 'fractions:Fraction', .* no method 'start'",
        ),
        ({"loss": {"name": ":"}}, "loss.name = ':' names no object"),
        ({"eval": {"temperature": 1.0, "top_p": 1e-46}}, "eval.top_p = 1e-46: give at least 1e-06"),
        ({"run": {"prompts_per_step": 10**18}}, r"run\.prompts_per_step = 1000000000000000000 with .* rollouts at a"),
        ({"run": {"steps": 10**12, "sync_every": 10**12}}, r"run\.prompts_per_step = 16 .*sync_every = 1000000000000"),
        ({"run": {"steps": True}}, "run.steps = true: input should be a number"),
        ({"trainer": {"lr": True}}, "trainer.lr = true: input should be a number"),
        ({"model": {"lora": {"r": True}}}, "model.lora.r = true: input should be a number"),
        ({"data": [{"max_rows": True}]}, r"data\[0\]\.max_rows = true: input should be a number"),
        ({"loss": {"clip": [True, 0.2]}}, r"loss\.clip\[0\] = true: input should be a number"),
        ({"run": {"in_flight": 1, "max_lag": 1}}, "run.in_flight = 1: input should be true or false"),
        ({"pack": {"shared_prefix": 1.0}}, "pack.shared_prefix = 1.0: input should be true or false"),
        ({"run": {"folder": "x" * 300}}, "run.folder = .*: a path has at most 4000 characters, 255 in each part"),
        ({"model": {"name": "a\0b"}}, "model.name = "),
        ({"filter": {"truncated": 1e300}}, r"filter\.truncated = 1e\+300: "),
    ],
)
def test_what_was_a_traceback_or_passed_is_a_message(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings.from_dict(tables)


LEAVES = "tests.test_fuzzed_settings:leaves"


def leaves() -> None:
    raise SystemExit


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"runtime": {"ranks": 100_000}}, r"runtime\.ranks = 100000: this machine has room for"),
        ({"model": {"name": "no:model", "device": "cpu"}}, "model.name = 'no:model' is neither a folder here nor a"),
        ({"model": {"lora": {"targets": "[1"}, "device": "cpu"}}, r"model\.lora\.targets = '\[1'"),
        ({"advantage": {"name": "builtins:sorted"}}, None),
        ({"advantage": {"name": "math:sqrt"}}, "advantage.name = 'math:sqrt' failed: TypeError: "),
        ({"advantage": {"name": "itertools:cycle"}}, "advantage: the rewards .* one finite number per reward"),
        (
            {"data": [{"name": "os:getcwd"}]},
            "data.name = 'os:getcwd' returned a str; it must return a list of podium.Row",
        ),
        ({"data": [{"name": "itertools:count"}]}, "data.name = 'itertools:count' returned a count"),
        ({"data": [{"name": LEAVES}]}, f"data.name = '{LEAVES}' failed: SystemExit"),
        ({"filter": {"accept": "math:nothing"}}, "filter.accept = 'math:nothing'"),
        ({"filter": {"accept": "operator:add"}}, "filter.accept = 'operator:add' cannot be used as the filter"),
    ],
)
def test_check_refuses_what_training_could_not_start(tables: dict[str, Any], message: str | None) -> None:
    given = Settings.from_dict({**GOOD, **tables})
    if message is None:
        assert check(given)[1]
        return
    with pytest.raises(InputError, match=message):
        check(given)


HUGE = "@podium.runs_inline\ndef huge(prompt, rollout):\n    return {value}\n"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "1e308 if rollout.sample_index else -1e308",
            r"reward './huge\.py:huge' on prompt .* returned -?1e\+308; return a",
        ),
        ("1e30 if rollout.sample_index else 0.0", None),
    ],
)
@pytest.mark.parametrize("advantage", [{"name": "grpo"}, {"name": "grpo", "std": "none"}, {"name": "rloo"}])
def test_huge_rewards_end_in_words_or_train(value: str, message: str | None, advantage: dict[str, Any]) -> None:
    Path("huge.py").write_text("import podium\n\n" + HUGE.format(value=value))
    run = {**GOOD["run"], "folder": "run"}
    given = Settings.from_dict({**GOOD, "run": run, "reward": [{"name": "./huge.py:huge"}], "advantage": advantage})
    if message is None:
        assert train(given).state == "finished"
        return
    with pytest.raises(PodiumError) as caught:
        train(given)
    assert re.search(message, str(caught.value))
