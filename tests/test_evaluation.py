"""What held-out groups amount to, worked by hand."""

import json
from pathlib import Path

import pytest

from podium.cli import main
from podium.errors import InputError
from podium.evaluation import Results, as_text, bootstrap, compared, results_file, verdict, wilson
from podium.records import Group
from podium.settings.sections import Eval
from podium.settings.tables import Settings
from tests.builders import make_group, make_prompt, make_rollout
from tests.conftest import small_tables


def groups() -> list[Group]:
    """Three prompts of four rollouts: 1 of 4, 4 of 4 and 1 of 2 correct (two abstained)."""
    long = make_rollout(token_ids=(5,) * 9, finish_reason="length")
    return [
        make_group((0.2, 1.2, 0.0, 0.0), prompt=make_prompt(0)),
        make_group((1.2,) * 4, prompt=make_prompt(1), rollouts=(make_rollout(),) * 3 + (long,)),
        make_group((1.2, None, 0.2, None), prompt=make_prompt(2), reward_counts={"judge_requests": 2.0}),
    ]


def test_every_number_by_hand() -> None:
    made = Results(groups(), pass_at=(1, 2, 4)).estimates()
    assert made["accuracy"].value == pytest.approx((1 / 4 + 1 + 1 / 2) / 3, abs=1e-12)
    assert (made["accuracy"].low, made["accuracy"].high) == bootstrap([0.25, 1.0, 0.5])
    assert made["pass@1"].value == pytest.approx(made["accuracy"].value, abs=1e-12)
    # of the 6 pairs of the first 3 hold the correct one, of the second all, of the third's two scored the only pair
    assert made["pass@2"].value == pytest.approx((1 / 2 + 1 + 1) / 3, abs=1e-12)
    # the third has no four scored rollouts; the other two are solved
    assert made["pass@4"].value == 1.0
    assert (made["pass@4"].low, made["pass@4"].high) == wilson(2, 2)
    assert made["reward_mean"].value == pytest.approx((0.35 + 1.2 + 0.7) / 3, abs=1e-12)
    assert made["stop_rate"].value == pytest.approx((1 + 3 / 4 + 1) / 3, abs=1e-12)
    assert made["length_mean"].value == pytest.approx((3 + (3 * 3 + 9) / 4 + 3) / 3, abs=1e-12)


def test_metrics_are_flat_and_count_what_rewards_counted() -> None:
    metrics = Results(groups(), pass_at=(2,)).metrics()
    assert metrics["eval/prompts"] == 3.0
    assert metrics["eval/length_max"] == 9.0
    assert metrics["eval/abstained"] == 2.0
    assert metrics["eval/judge_requests"] == 2.0
    assert metrics["eval/verifier/arithmetic"] == pytest.approx((0.35 + 1.2 + 0.7) / 3)
    assert metrics["eval/accuracy_low"] < metrics["eval/accuracy"] < metrics["eval/accuracy_high"]
    assert metrics["eval/pass@2_low"] <= metrics["eval/pass@2"] <= metrics["eval/pass@2_high"]


def test_each_verifier_has_its_mean_over_its_own_prompts() -> None:
    one = make_group((1.0, 0.0), reward_parts=({"math": 1.0, "format": 1.0}, {"math": 0.0, "format": None}))
    other = make_group((0.5, 0.5), prompt=make_prompt(1), reward_parts=({"exact": 0.5}, {"exact": 0.5}))
    assert Results([one, other]).verifiers() == {"math": 0.5, "format": 1.0, "exact": 0.5}


def test_sources_have_rows_of_their_own_where_there_are_several() -> None:
    results = Results(groups(), tables={0: "jsonl", 1: "arithmetic", 2: "jsonl"})
    metrics = results.metrics()
    assert metrics["eval/source/jsonl/accuracy"] == pytest.approx((1 / 4 + 1 / 2) / 2)
    assert metrics["eval/source/arithmetic/accuracy"] == 1.0
    assert Results(groups(), tables=dict.fromkeys(range(3), "jsonl")).by_table() == {}


def test_accuracy_is_left_out_where_no_highest_reward_is_known() -> None:
    metrics = Results([make_group((0.5, 0.7), correct=(None, None))], pass_at=(2,)).metrics()
    assert "eval/accuracy" not in metrics
    assert "eval/pass@2" not in metrics
    assert metrics["eval/reward_mean"] == pytest.approx(0.6)


def test_the_text_shows_intervals_verifiers_sources_and_rollouts() -> None:
    text = as_text(Results(groups(), (2,), {0: "jsonl", 1: "arithmetic", 2: "jsonl"}))
    assert "accuracy     0.5833  0.25 to 1" in text
    assert "3 prompts, 4 rollouts each (accuracy is mean@4), longest answer 9 tokens" in text
    assert "arithmetic  0.75" in text
    assert "jsonl       2" in text
    assert "What is 1 + 2?" in text


def test_the_data_holds_every_rollout() -> None:
    data = json.loads(json.dumps(results_file("m", {"eval": {"n": 4}, "run": {}}, Results(groups()))))
    assert (data["model"], data["settings"]) == ("m", {"eval": {"n": 4}})
    assert [len(prompt["rollouts"]) for prompt in data["prompts"]] == [4, 4, 4]
    assert data["prompts"][1]["rollouts"][3]["finish_reason"] == "length"
    assert data["intervals"]["accuracy"]["value"] == data["metrics"]["eval/accuracy"]


def of_accuracies(values: list[float], first_ordinal: int = 0) -> Results:
    """One rollout a prompt."""
    return Results([make_group((1.2 * v,), prompt=make_prompt(first_ordinal + i)) for i, v in enumerate(values)])


def test_two_models_are_compared_on_the_prompts_that_both_have() -> None:
    what, made = compared(of_accuracies([1, 1, 0, 1]), of_accuracies([1, 0, 0], first_ordinal=1))
    assert (what, made.num_prompts) == ("accuracy", 3)
    assert made.difference.value == pytest.approx((1 + 0 + 1 - 1 - 0 - 0) / 3)


def test_the_verdict_names_the_better_one_only_if_chance_is_no_explanation() -> None:
    good, bad = of_accuracies([1.0] * 12), of_accuracies([0.0] * 9 + [1.0] * 3)
    assert verdict(*compared(good, bad), "A", "B").startswith("A is better: accuracy differs by +0.7500")
    assert verdict(*compared(bad, good), "A", "B").startswith("B is better: accuracy differs by -0.7500")
    near = of_accuracies([0.0] * 1 + [1.0] * 11)
    assert verdict(*compared(good, near), "A", "B").startswith("no significant difference: ")
    assert verdict(*compared(good, good), "A", "B") == "the same accuracy on every one of 12 prompts"


def test_without_a_highest_reward_the_rewards_are_compared() -> None:
    def unknown(shift: float) -> Results:
        made = [make_group((i / 10 + shift,), prompt=make_prompt(i), correct=(None,)) for i in range(8)]
        return Results(made)

    assert verdict(*compared(unknown(0.2), unknown(0.0)), "A", "B").startswith("A is better: reward differs by +0.2000")


def test_results_without_a_common_prompt_cannot_be_compared() -> None:
    with pytest.raises(InputError, match="nothing to compare"):
        compared(of_accuracies([1.0]), of_accuracies([1.0], first_ordinal=5))


HELD_OUT = {"data": [{"name": "arithmetic", "split": "held_out", "max_rows": 40}]}


def write_settings(path: Path, **tables: object) -> str:
    made = small_tables(path.parent / "run") | {"eval": HELD_OUT} | tables
    path.write_text(Settings.from_dict(made).to_toml())
    return str(path)


def test_a_loop_evaluates_with_its_own_sampling_and_keeps_the_rollouts(tmp_path: Path) -> None:
    held_out = {"n": 4, "temperature": 0.7, "every": 2, **HELD_OUT}
    settings = write_settings(tmp_path / "run.toml", eval=held_out)
    assert main(["train", settings, "--quiet"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if line.get("eval")]
    assert [line["step"] for line in told] == [0, 2, 4]
    assert all(line["eval/accuracy"] < line["eval/pass@2"] < line["eval/pass@4"] for line in told)
    for line in told:
        path = tmp_path / "run" / "evals" / f"step-{line['step']:06d}.jsonl"
        rollouts = [json.loads(rollout) for rollout in path.read_text().splitlines()]
        assert len(rollouts) == 40 * 4
        assert sum(rollout["correct"] for rollout in rollouts) / 160 == pytest.approx(line["eval/accuracy"])


def test_a_run_is_compared_with_its_base_on_the_same_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = {"data": [HELD_OUT["data"][0] | {"max_rows": 100}]}
    more = {"run": small_tables(tmp_path / "run")["run"] | {"steps": 20, "prompts_per_step": 8}}
    settings = write_settings(tmp_path / "run.toml", eval=held_out, **more)
    assert main(["train", settings, "--quiet"]) == 0
    capsys.readouterr()
    out = tmp_path / "results.json"
    assert main(["eval", f"{tmp_path}/run", "--against", "embedded", "--json", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    pair, written = told["comparison"], json.loads(out.read_text())
    assert pair["difference"]["value"] == pytest.approx(told["eval/accuracy"] - told["against"]["eval/accuracy"])
    assert pair["only_first"] - pair["only_second"] == round(100 * pair["difference"]["value"])
    assert pair["verdict"].startswith(f"{tmp_path}/run is better")
    assert written["comparison"] == pair
    assert len(written["prompts"]) == len(written["against"]["prompts"]) == 100
    assert main(["eval", f"{tmp_path}/run", "--against", "embedded"]) == 0
    assert capsys.readouterr().out.strip().endswith(pair["verdict"])


@pytest.mark.parametrize(("n", "ks"), [(1, ()), (2, (2,)), (3, (2, 3)), (4, (2, 4)), (10, (2, 4, 8, 10))])
def test_pass_at_k_is_for_the_powers_of_two_and_all_rollouts(n: int, ks: tuple[int, ...]) -> None:
    assert Eval(n=n).ks == ks


def test_a_results_file_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = write_settings(tmp_path / "run.toml")
    (tmp_path / "results.json").write_text("mine")
    assert main(["eval", "embedded", settings, "--out", f"{tmp_path}/results.json"]) == 2
    assert "exists already; give a new file" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_text() == "mine"
