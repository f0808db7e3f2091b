from pathlib import Path
from typing import Any

import pytest

from podium.errors import InputError
from podium.settings.tables import Settings, override, read_toml


def complaint(tables: dict[str, Any]) -> str:
    with pytest.raises(InputError) as caught:
        Settings.from_dict(tables)
    return str(caught.value)


def test_no_settings_at_all_are_the_defaults() -> None:
    assert Settings.from_dict({}).to_dict() == {
        "run": {
            "steps": 100,
            "seed": 0,
            "prompts_per_step": 16,
            "rollouts_per_prompt": 8,
            "sync_every": 1,
            "max_lag": 0,
            "in_flight": False,
        },
        "model": {
            "name": "embedded",
            "dtype": "auto",
            "device": "auto",
            "lora": {"r": 16, "alpha": 32.0, "targets": "all-linear"},
            "trust_remote_code": False,
        },
        "data": [{"name": "arithmetic", "split": "train"}],
        "rollout": {"name": "single_turn", "temperature": 1.0, "max_new_tokens": 256, "stop": []},
        "engine": {"name": "inprocess", "concurrency": 512},
        "tool": [],
        "reward": [],
        "scoring": {"max_failed_share": 0.1},
        "filter": {"accept": "signal", "truncated": "keep", "refill": False},
        "advantage": {"name": "grpo", "std": "population"},
        "pack": {"shared_prefix": False},
        "loss": {
            "name": "grpo",
            "average": "tokens",
            "old": "auto",
            "kl_beta": 0.0,
            "correction": {"level": "token", "cap": 2.0},
            "clip": [0.2, 0.2],
        },
        "trainer": {
            "name": "single",
            "lr": 1e-5,
            "schedule": "constant",
            "warmup_steps": 0,
            "optimizer": "adamw",
            "betas": [0.9, 0.999],
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "epochs_per_batch": 1,
            "minibatches_per_step": 1,
        },
        "sync": {"name": "shared"},
        "checkpoint": {"every": 10, "keep": 3},
        "eval": {"every": 0, "n": 1, "temperature": 0.0, "data": []},
        "report": [{"name": "console"}, {"name": "page"}],
        "runtime": {"name": "local", "ranks": 1},
    }


FULL = """
[run]
folder = "somewhere/run"
steps = 7
epochs = 2
seed = 3
prompts_per_step = 4
rollouts_per_prompt = 6
sync_every = 2
[model]
lora = false
[rollout]
temperature = 0.7
stop = ["#"]
system = "Ünïcode \\"quoted\\""
[[data]]
name = "sums"
max_rows = 5
max_prompt_tokens = 30
[[data]]
name = "jsonl"
path = "rows.jsonl"
[[reward]]
name = "arithmetic"
weight = 0.5
[[reward]]
name = "exact"
[trainer]
betas = [0.8, 0.9]
[eval]
every = 5
temperature = 0.5
top_k = 3
[[eval.data]]
split = "held_out"
[[report]]
name = "page"
"""


@pytest.mark.parametrize("text", ["", FULL, "[model.lora]\ntargets = ['q_proj', 'v_proj']\n"])
def test_saved_settings_read_back_as_the_same(tmp_path: Path, text: str) -> None:
    (tmp_path / "given.toml").write_text(text)
    settings = Settings.from_toml(tmp_path / "given.toml")
    (tmp_path / "saved.toml").write_text(settings.to_toml())
    again = Settings.from_toml(tmp_path / "saved.toml")
    assert again == settings
    assert again.to_toml() == settings.to_toml()
    assert again.resolve() == again


def test_settings_reach_the_plan_and_the_options(tmp_path: Path) -> None:
    (tmp_path / "full.toml").write_text(FULL)
    settings = Settings.from_toml(tmp_path / "full.toml")
    plan = settings.plan
    assert (plan.steps, plan.prompts_per_step, plan.rollouts_per_prompt) == (7, 4, 6)
    assert (plan.sync_every, plan.epochs, plan.prompts_per_window) == (2, 2, 8)
    assert settings.model.lora is False
    assert settings.trainer.options["betas"] == (0.8, 0.9)
    assert settings.data[0].options == {"split": "train"}
    assert (settings.data[0].max_rows, settings.data[0].max_prompt_tokens) == (5, 30)
    assert settings.data[1].options["path"] == "rows.jsonl"
    assert [reward.weight for reward in settings.reward] == [0.5, 1.0]
    assert settings.eval.data[0].options["split"] == "held_out"


@pytest.mark.parametrize("key", ["top_k", "top_p"])
def test_training_on_a_cut_distribution_is_refused_and_evaluation_on_one_is_not(key: str) -> None:
    assert complaint({"rollout": {key: 1}}).startswith(f"rollout.{key} = 1")
    assert "wrong in silence" in complaint({"rollout": {key: 1}})
    Settings.from_dict({"eval": {key: 1, "temperature": 0.7, "data": [{"name": "arithmetic"}]}})


def test_the_learning_rate_follows_what_is_trained_unless_it_is_given() -> None:
    assert Settings.from_dict({}).trainer.options["lr"] == 1e-5
    assert Settings.from_dict({"model": {"lora": False}}).trainer.options["lr"] == 1e-6
    assert Settings.from_dict({"model": {"lora": False}, "trainer": {"lr": 0.5}}).trainer.options["lr"] == 0.5


TOP = (
    "advantage, checkpoint, data, engine, environment, eval, filter, loss, model, pack, report, reward, rollout, run, "
    "runtime, scoring, sync, tool, trainer"
)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"bogus": {"x": 1}}, f"bogus is not a setting; valid here: {TOP}"),
        ({"lr": 1e-5}, f"lr is not a setting; valid here: {TOP}"),
        (
            {"run": {"stepz": 1}},
            "run.stepz is not a setting; valid here: epochs, folder, in_flight, max_lag, prompts_per_step, "
            "rollouts_per_prompt, seed, steps, sync_every",
        ),
        ({"report": [{"name": "jsonl"}]}, "report 'jsonl' has no effect: it is always written; remove its table"),
        ({"model": {"lora": {"rank": 8}}}, "model.lora.rank is not a setting; valid here: alpha, r, targets"),
        (
            {"eval": {"evry": 1}},
            "eval.evry is not a setting; valid here: data, every, n, temperature, top_k, top_p",
        ),
        (
            {"checkpoint": {"evry": 1}},
            "checkpoint.evry is not a setting; valid here: every, keep, on_checkpoint, start_from",
        ),
        (
            {"scoring": {"x": 1}},
            "scoring.x is not a setting; valid here: max_failed_share, worker_memory_mb",
        ),
        (
            {"loss": {"clipp": 0.2}},
            "loss.clipp is not an option of grpo; did you mean 'clip'? Valid: clip",
        ),
        (
            {"loss": {"name": "gspp"}},
            "loss.name = 'gspp' is not known; did you mean 'gspo'? Valid: cispo, dapo, dro, grpo, gspo, "
            "importance_sampling, mean_logprob, reinforce, sequence, or a 'module:object'",
        ),
        ({"sync": {"every": 2}}, "sync.every is not an option of shared; Valid: none"),
        (
            {"data": [{}, {"splt": "train"}]},
            "data[1].splt is not an option of arithmetic; did you mean 'split'? Valid: split",
        ),
        ({"data": [{"name": "jsonl"}]}, "data[0].path is required"),
        ({"reward": [{"weight": 1}]}, "reward.0.name is required"),
        (
            {"reward": [{"name": "exact", "lax": True}]},
            "reward[0].lax is not an option of exact; Valid: thinking",
        ),
        (
            {"eval": {"data": [{"name": "jsonl", "file": "x"}]}},
            "eval.data[0].file is not an option of jsonl; Valid: answer_column, path, prompt_column, remap, "
            "reward_column",
        ),
        (
            {"report": [{"name": "page", "every": 1}]},
            "report[0].every is not an option of page; Valid: none",
        ),
    ],
)
def test_a_key_that_nothing_reads_is_refused_with_the_valid_ones(tables: dict[str, Any], message: str) -> None:
    assert complaint(tables) == message


@pytest.mark.parametrize(
    ("tables", "start"),
    [
        ({"run": {"steps": "many"}}, "run.steps = 'many': "),
        ({"run": {"steps": 1.5}}, "run.steps = 1.5: "),
        ({"run": {"steps": 0}}, "run.steps = 0: input should be greater than or equal to 1"),
        ({"run": {"steps": [1]}}, "run.steps = [1]: "),
        ({"run": {"seed": -1}}, "run.seed = -1: "),
        ({"model": {"name": 3}}, "model.name = 3: input should be a valid string"),
        ({"run": {"sync_every": -1}}, "run.sync_every = -1: "),
        ({"run": {"max_lag": -1}}, "run.max_lag = -1: "),
        (
            {"run": {"max_lag": 1, "sync_every": 2}},
            "run.max_lag = 1 with run.sync_every = 2: the async loop syncs after",
        ),
        (
            {"run": {"max_lag": 1, "sync_every": 0}},
            "run.max_lag = 1 with run.sync_every = 0: the async loop syncs after",
        ),
        ({"run": {"in_flight": True}}, "run.in_flight has no effect with run.max_lag = 0"),
        ({"run": 3}, "run = 3: "),
        ({"model": {"dtype": "float16"}}, "model.dtype = 'float16': input should be 'auto', 'float32' or 'bfloat16'"),
        ({"model": {"lora": {"r": 0}}}, "model.lora.r = 0: input should be greater than or equal to 1"),
        ({"model": {"lora": 3}}, "model.lora = 3: "),
        ({"model": {"lora": {"alpha": 0}}}, "model.lora.alpha = 0: "),
        ({"data": {"name": "arithmetic"}}, "[data] must be written [[data]]"),
        ({"data": [{"max_rows": 0}]}, "data.0.max_rows = 0: "),
        ({"data": [{"split": "test"}]}, "data[0].split = 'test': input should be 'train' or 'held_out'"),
        ({"loss": "grpo"}, "loss = 'grpo': "),
        ({"loss": {"clip": 2}}, "loss.clip = 2: input should be less than or equal to 1"),
        ({"loss": {"clip": float("nan")}}, "loss.clip = nan: "),
        ({"advantage": {"clip": 0}}, "advantage.clip = 0: input should be greater than 0"),
        ({"trainer": {"lr": 0}}, "trainer.lr = 0: input should be greater than 0"),
        ({"trainer": {"lr": float("inf")}}, "trainer.lr = inf: input should be a finite number"),
        ({"reward": [{"name": "exact", "weight": float("nan")}]}, "reward.0.weight = nan: input should be a finite"),
        ({"rollout": {"stop": "#"}}, "rollout.stop = '#': input should be a valid list"),
        ({"rollout": {"top_p": 1.5}}, "rollout.top_p = 1.5: "),
        ({"scoring": {"max_failed_share": 1.1}}, "scoring.max_failed_share = 1.1: "),
        ({"filter": {"truncated": float("inf")}}, "filter.truncated = inf: "),
        ({"filter": {"truncated": "drop"}}, "filter.truncated = 'drop': "),
        ({"filter": {"accept": "perhaps"}}, "filter.accept = 'perhaps': give 'signal', 'all', or a function"),
        ({"filter": {"refill": 0}}, "filter.refill = 0: "),
        ({"filter": {"retire_pass_rate": 0}}, "filter.retire_pass_rate = 0: input should be greater than 0"),
        ({"filter": {"retire_pass_rate": 1.1}}, "filter.retire_pass_rate = 1.1: "),
        ({"eval": {"temperature": -1}}, "eval.temperature = -1: "),
        ({"eval": {"temperature": 1e-4}}, "eval.temperature = 0.0001: give 0 for greedy answers, or at least 0.001"),
        ({"rollout": {"temperature": 1e-4}}, "rollout.temperature = 0.0001: give 0 for greedy answers, or at least"),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep = 0: "),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_its_field(tables: dict[str, Any], start: str) -> None:
    assert complaint(tables).startswith(start)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"run": {"rollouts_per_prompt": 1}},
            "run.rollouts_per_prompt = 1: a group of one has no baseline; give 2 or more",
        ),
        ({"data": []}, "data: at least one [[data]] table is needed"),
        (
            {"model": {"dtype": "bfloat16", "lora": False}},
            "model.dtype = 'bfloat16' with model.lora = false: bfloat16 weights round small updates away; "
            "train full weights in float32, or set a [model.lora] table",
        ),
        (
            {"eval": {"every": 5}},
            "eval.every has no effect without an [[eval.data]] table; add one or remove it",
        ),
        (
            {"filter": {"retire_pass_rate": 0.9}, "run": {"epochs": 1}},
            "filter.retire_pass_rate has no effect with run.epochs = 1: no row is drawn twice; remove one of them",
        ),
        (
            {"rollout": {"temperature": 0}},
            "rollout.temperature = 0: greedy rollouts of a group are all the same; give a value above 0",
        ),
    ],
)
def test_settings_that_do_not_agree_are_refused_with_the_remedy_and_nothing_else(
    tables: dict[str, Any], message: str
) -> None:
    assert complaint(tables) == message


@pytest.mark.parametrize(
    ("given", "planned"),
    [
        ({}, 0),
        ({"refill": True}, 10),
        ({"refill": 1}, 1),
        ({"refill": 3}, 3),
    ],
)
def test_refills_have_a_bound_where_there_are_any(given: dict[str, Any], planned: int) -> None:
    settings = Settings.from_dict({"filter": given})
    assert settings.plan.max_refills == planned
    assert Settings.from_dict(settings.to_dict()) == settings


def test_bfloat16_under_lora_is_fine() -> None:
    assert Settings.from_dict({"model": {"dtype": "bfloat16"}}).model.dtype == "bfloat16"


def test_settings_made_in_code_are_checked_like_those_of_a_file() -> None:
    with pytest.raises(ValueError, match="a group of one has no baseline"):
        Settings(run={"rollouts_per_prompt": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tables", "flags", "expected"),
    [
        ({}, ["--run.steps=5"], {"run": {"steps": 5}}),
        ({"run": {"steps": 1, "seed": 2}}, ["--run.steps=5"], {"run": {"steps": 5, "seed": 2}}),
        ({}, ["--run.steps=5", "--run.steps=6"], {"run": {"steps": 6}}),
        ({}, ["--run.folder=plain text"], {"run": {"folder": "plain text"}}),
        ({}, ['--run.folder="5"'], {"run": {"folder": "5"}}),
        ({}, ["--run.folder="], {"run": {"folder": ""}}),
        ({}, ["--run.folder=a=b"], {"run": {"folder": "a=b"}}),
        ({}, ["--loss.clip=[0.2, 0.28]"], {"loss": {"clip": [0.2, 0.28]}}),
        ({}, ["--trainer.lr=1e-4"], {"trainer": {"lr": 1e-4}}),
        ({}, ["--rollout.stop=['#', '?']"], {"rollout": {"stop": ["#", "?"]}}),
        ({}, ["--filter.accept=all"], {"filter": {"accept": "all"}}),
        ({"model": {"lora": {"r": 4}}}, ["--model.lora=false"], {"model": {"lora": False}}),
        ({}, ["--model.lora.r=8"], {"model": {"lora": {"r": 8}}}),
        ({"model": {"lora": {"alpha": 4}}}, ["--model.lora.r=8"], {"model": {"lora": {"alpha": 4, "r": 8}}}),
        ({"model": {"lora": False}}, ["--model.lora.r=8"], {"model": {"lora": {"r": 8}}}),
        ({"data": [{"name": "a"}]}, ["--data.max_rows=3"], {"data": [{"name": "a", "max_rows": 3}]}),
        ({"data": [{"name": "a"}]}, ["--data.0.max_rows=3"], {"data": [{"name": "a", "max_rows": 3}]}),
        ({"data": [{"name": "a"}, {"name": "b"}]}, ["--data.1.name=c"], {"data": [{"name": "a"}, {"name": "c"}]}),
        ({}, ["--reward.name=exact", "--reward.weight=2"], {"reward": [{"name": "exact", "weight": 2}]}),
        ({}, ["--eval.data.split=held_out"], {"eval": {"data": [{"split": "held_out"}]}}),
        ({"eval": {"data": []}}, ["--eval.data.max_rows=2"], {"eval": {"data": [{"max_rows": 2}]}}),
        ({"eval": {"data": []}}, ["--eval.data.0.max_rows=2"], {"eval": {"data": [{"max_rows": 2}]}}),
    ],
)
def test_an_override_changes_one_key(tables: dict[str, Any], flags: list[str], expected: dict[str, Any]) -> None:
    assert override(tables, flags) == expected


TWO = {"data": [{"name": "a"}, {"name": "b"}]}


@pytest.mark.parametrize(
    ("tables", "flag", "message"),
    [
        ({}, "--run.steps", "'--run.steps' is not an override; write --section.key=value"),
        ({}, "run.steps=3", "'run.steps=3' is not an override; write --section.key=value"),
        ({}, "--steps=3", "'--steps=3' is not an override; write --section.key=value; did you mean --run.steps?"),
        ({}, "-x", "'-x' is not an override; write --section.key=value"),
        ({}, "stray", "'stray' is not an override; write --section.key=value"),
        ({"run": {"steps": 1}}, "--run.steps.x=3", "'--run.steps.x=3': run.steps is not a table"),
        ({"run": {"steps": 1}}, "--run.steps.x.y=3", "'--run.steps.x.y=3': 'x' is inside a value that is not a table"),
        (TWO, "--data.name=c", "'--data.name=c': there are 2 tables; name one by its index, 0 to 1"),
        (TWO, "--data.2.name=c", "'--data.2.name=c': there are 2 tables; name one by its index, 0 to 1"),
    ],
)
def test_an_override_that_reaches_nothing_is_refused(tables: dict[str, Any], flag: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        override(tables, [flag])
    assert str(caught.value) == message


def test_overrides_are_applied_before_anything_is_checked(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[run]\nsteps = 'many'\n")
    assert Settings.from_toml(tmp_path / "run.toml", ["--run.steps=3"]).run.steps == 3


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"[run\n", "is not valid TOML: "),
        (b"[run]\nname = \xff", "is not valid TOML: "),
        (b"a = 1\na = 2", "overwrite"),
    ],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=complaint) as caught:
        read_toml(path)
    assert str(path) in str(caught.value)


def test_a_settings_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no settings file .*missing\.toml"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(InputError, match="is a folder, not a settings file"):
        read_toml(tmp_path)


EXAMPLES = sorted((Path(__file__).parent.parent / "examples").rglob("*.toml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid(path: Path) -> None:
    assert Settings.from_toml(path).reward


def test_there_is_an_example() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("key", ["n", "top_k", "top_p"])
def test_an_evaluation_setting_that_would_have_no_effect_is_refused(key: str) -> None:
    value = 0.5 if key == "top_p" else 2
    assert complaint({"eval": {key: value}}).startswith(f"eval.{key} has no effect without")
    greedy = {"eval": {key: value, "data": [{"name": "arithmetic"}]}}
    assert complaint(greedy).startswith(f"eval.{key} has no effect on greedy rollouts")


def test_lora_may_be_written_as_true() -> None:
    assert Settings.from_dict({"model": {"lora": True}}) == Settings.from_dict({})
