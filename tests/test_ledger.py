import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from podium.model.load import EMBEDDED
from podium.records import EvalReport, StepReport
from podium.run.folder import Ledger, RunFolder, piece_decoder, read_pieces, rollout_lines
from tests.builders import make_group, make_prompt, make_rollout, make_step_report


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(RunFolder(tmp_path))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_one_line_of_metrics_and_one_file_of_rollouts(ledger: Ledger, tmp_path: Path) -> None:
    ledger.write(make_step_report(step=1, reward__mean=0.5))
    ledger.write(make_step_report(make_group((0.0, 0.1, 0.2)), make_group(), step=2, reward__mean=0.75))
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": 0.75}]
    assert [len(lines(tmp_path / "rollouts" / f"step-00000{i}.jsonl")) for i in (1, 2)] == [2, 5]


def test_an_evaluation_is_a_line_that_says_so(ledger: Ledger, tmp_path: Path) -> None:
    ledger.evaluated(EvalReport(4, 3, {"eval/accuracy": 0.25}, 1.5))
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 4, "policy_version": 3, "eval": True, "time/eval_s": 1.5, "eval/accuracy": 0.25}
    ]
    assert not (tmp_path / "rollouts").exists()


def test_metrics_have_nine_digits(ledger: Ledger, tmp_path: Path) -> None:
    ledger.write(make_step_report(loss__total=-1 / 3, optim__lr=1e-5, pack__tokens=123456.0))
    line = lines(tmp_path / "metrics.jsonl")[0]
    assert (line["loss/total"], line["optim/lr"], line["pack/tokens"]) == (-0.333333333, 1e-5, 123456.0)


def test_a_rollout_line_has_all_that_happened_to_it() -> None:
    rollout = make_rollout(
        "####\n3",
        (8, 24),
        rollout_logprobs=(-0.12345678, -1.0),
        sample_index=1,
        policy_version_min=2,
        policy_version_max=3,
    )
    group = make_group(
        (1.2,),
        prompt=make_prompt(7),
        rollouts=(rollout,),
        advantages=(0.70710678,),
        reward_parts=({"x": 1.0, "y": None},),
    )
    assert list(rollout_lines(make_step_report(group))) == [
        {
            "ordinal": 7,
            "sample_index": 1,
            "seed": 0,
            "policy_version": [2, 3],
            "trained": True,
            "source": "arithmetic",
            "prompt": "What is 1 + 2?",
            "answer": "3",
            "text": "####\n3",
            "reward": 1.2,
            "reward_parts": {"x": 1.0, "y": None},
            "correct": True,
            "advantage": 0.707107,
            "finish_reason": "stop",
            "token_ids": [8, 24],
            "logprobs": [-0.123457, -1.0],
        }
    ]


def test_a_rollout_that_was_trained_has_the_trainers_logprobs_less_the_samplers() -> None:
    rollout = make_rollout("x", (8, 24, 2), rollout_logprobs=(-0.5, -1.0, -0.25))
    group = make_group((1.2, None), prompt=make_prompt(7), rollouts=(rollout, rollout))
    made = make_step_report(group)
    seen = {(7, rollout.digest): (-0.5, -1.1234567, -0.250000001)}
    lines = list(rollout_lines(StepReport(made.state, made.metrics, made.groups, made.kept, seen)))
    assert [line.get("logprob_gaps") for line in lines] == [[0.0, -0.12346, 0.0], None]
    assert "-0.0," not in json.dumps(lines[0]["logprob_gaps"])  # nothing rounds to a minus zero
    broken = {(7, rollout.digest): (-0.5, float("nan"), -0.25)}
    lines = list(rollout_lines(StepReport(made.state, made.metrics, made.groups, made.kept, broken)))
    assert "logprob_gaps" not in lines[0]  # JSON has no word for it


def test_every_rollout_has_its_own_logprobs_and_gaps() -> None:
    """Also behind one that was not trained, and an empty one."""
    written = [(-0.1, -0.2), (-0.3,), (), (-0.4, -0.5, -0.6), (-0.7,)]
    rollouts = [
        make_rollout("x", tuple(range(len(own))), rollout_logprobs=own, digest=f"d{number}")
        for number, own in enumerate(written)
    ]
    groups = (
        make_group((None, 1.0, 0.0), prompt=make_prompt(1), rollouts=tuple(rollouts[:3])),
        make_group((1.0, 0.0), prompt=make_prompt(2), rollouts=tuple(rollouts[3:])),
    )
    made = make_step_report(*groups)
    seen = {(1, "d0"): (0.0, 0.0), (1, "d1"): (-1.3,), (1, "d2"): (), (2, "d3"): (-2.4, -3.5, -4.6)}
    lines = list(rollout_lines(StepReport(made.state, made.metrics, made.groups, made.kept, seen)))
    assert [tuple(line["logprobs"]) for line in lines] == written
    assert [line.get("logprob_gaps") for line in lines] == [None, [-1.0], [], [-2.0, -3.0, -4.0], None]


def test_the_text_of_every_token_is_kept_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def decode(token_id: int) -> str:
        asked.append(token_id)
        return f"<{token_id}>"

    folder = RunFolder(tmp_path)
    ledger = Ledger(folder, decode)
    ledger.write(make_step_report(make_group((0.0,), rollouts=(make_rollout("x", (8, 24, 8, 2)),)), step=1))
    ledger.write(make_step_report(make_group((0.0,), rollouts=(make_rollout("x", (2, 9)),)), step=2))
    assert asked == [2, 8, 24, 9]
    assert read_pieces(folder.tokens) == {2: "<2>", 8: "<8>", 24: "<24>", 9: "<9>"}


def test_the_texts_of_tokens_survive_a_kill_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_text('\n{"8": "a"}\n{"24": "b')
    rollout = make_rollout("x", (8, 24))
    Ledger(RunFolder(tmp_path), str).write(make_step_report(make_group((0.0,), rollouts=(rollout,))))
    assert read_pieces(path) == {8: "a", 24: "24"}


def test_a_tokenizers_space_before_a_word_is_kept() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return "word"

        def convert_ids_to_tokens(self, token_id: int) -> str:
            return "▁word" if token_id == 1 else "word"

    assert [piece_decoder(Tokenizer())(token_id) for token_id in (1, 2)] == [" word", "word"]


def test_a_rollout_counts_as_trained_only_if_its_group_was_kept_and_it_has_a_reward() -> None:
    kept = make_group((0.2, None, 1.2), prompt=make_prompt(0))
    dropped = make_group((0.2, 0.2), prompt=make_prompt(1))
    made = make_step_report(kept, dropped)
    report = StepReport(made.state, made.metrics, made.groups, kept=(0,))
    assert [line["trained"] for line in rollout_lines(report)] == [True, False, True, False, False]


@pytest.mark.parametrize("end", ["", "\ud800"])
def test_no_text_of_a_rollout_can_break_a_line(end: str, ledger: Ledger, tmp_path: Path) -> None:
    """The second is nothing that orjson would write."""
    hostile = f'a\n{{"step": 9}}\r\u2028\x00"{end}'
    ledger.write(make_step_report(make_group((0.0,), rollouts=(make_rollout(hostile),))))
    (line,) = (tmp_path / "rollouts" / "step-000001.jsonl").read_bytes().splitlines()
    assert json.loads(line)["text"] == hostile


def test_lines_are_lines_to_every_reader(ledger: Ledger, tmp_path: Path) -> None:
    """orjson leaves some line ends as they are, at which Python's str.splitlines ends a line."""
    text = "a\x85b\u2028c\u2029d\x0ce é ✓"
    ledger.write(make_step_report(make_group((0.0,), rollouts=(make_rollout(text),))))
    (line,) = (tmp_path / "rollouts" / "step-000001.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["text"] == text


@pytest.mark.parametrize("value", [-0.5, -1e-9, -12.3456784, 0.1 + 0.2, -1.5e-6])
def test_logprobs_have_six_digits_behind_the_point_and_no_negative_zero(value: float) -> None:
    rollout = make_rollout(rollout_logprobs=(value,) * 3)
    [line] = rollout_lines(make_step_report(make_group((0.0,), rollouts=(rollout,))))
    assert [repr(number) for number in line["logprobs"]] == [repr(round(value, 6) + 0.0)] * 3


def test_the_tokenizer_beneath_gives_the_texts_that_transformers_gives() -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(EMBEDDED)
    decode = piece_decoder(tokenizer)
    for token_id in range(len(tokenizer)):
        assert decode(token_id) == tokenizer.decode([token_id], skip_special_tokens=False)
