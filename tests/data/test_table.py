"""What `podium check` shows of several sources."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from podium.data.build import build_data, data_lines, read_sources
from podium.model.load import EMBEDDED, load_policy
from podium.settings.tables import Settings


def lines_of(tables: list[dict[str, Any]], **others: Any) -> list[str]:
    settings = Settings.from_dict({"data": tables, "rollout": {"max_new_tokens": 24}, **others})
    policy = load_policy(settings.model, seed=0)
    data = build_data(settings, read_sources(settings.data), policy, settings.plan)
    return data_lines(data, AutoTokenizer.from_pretrained(EMBEDDED), "data")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_each_source_has_a_line_with_its_counts_lengths_and_rewards(tmp_path: Path) -> None:
    # the embedded model's prompt is a start token, a token a character and a line break: 4, 5, 6 and 12 tokens
    rows = [{"prompt": "ab"}, {"prompt": "abc", "reward": "exact"}, {"prompt": "abcd"}, {"prompt": "a" * 10}]
    path = write(tmp_path / "rows.jsonl", rows)
    head, rule, first, second, *rest = lines_of(
        [
            {"name": "jsonl", "path": path, "max_prompt_tokens": 6, "weight": 1},
            {"name": "arithmetic", "max_rows": 9, "weight": 3},
        ]
    )
    assert cells(head) == ["source", "rows", "kept", "dropped", "epoch", "prompt tokens", "rewards"]
    assert set(rule.strip()) == {"─"}
    # 3 and 9 kept: 12 prompts a pass, a quarter and three quarters of them
    assert cells(first) == [
        "data[0] jsonl", "4", "3", "1 over 6 tokens", "3", "4 to 6, median 5", "the settings' (2), exact (1)"
    ]  # fmt: skip
    assert cells(second)[:3] == ["data[1] arithmetic", "15692", "9"]
    assert cells(second)[-3:] == ["9", "18 to 18, median 18", "the settings'"]
    assert rest == [
        "as the policy sees them:",
        "data[0] row 1: '<s>ab\\n' → None",
        "data[0] row 2: '<s>abc\\n' → None",
        "data[0] row 3: '<s>abcd\\n' → None",
        "data[1] row 1: '<s>What is 10 + 10?\\n' → '20'",
        "data[1] row 2: '<s>What is 10 + 11?\\n' → '21'",
        "data[1] row 3: '<s>What is 10 + 12?\\n' → '22'",
    ]


def test_a_source_of_which_nothing_is_kept_stands_there_beside_another(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a" * 10}])
    _, _, first, *_ = lines_of([{"name": "jsonl", "path": path, "max_prompt_tokens": 6}, {"name": "arithmetic"}])
    assert cells(first) == ["data[0] jsonl", "1", "0", "1 over 6 tokens", "0", "the settings'"]


def test_the_system_message_is_in_what_is_shown_and_long_prompts_are_shortened(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x" * 450, "answer": 3}])
    last = lines_of([{"name": "jsonl", "path": path}], rollout={"max_new_tokens": 8, "system": "S" * 40})[-1]
    assert last.startswith("data[0] row 1: '<s>" + "S" * 40 + "\\n" + "xxx")
    assert last.endswith("xxx\\n' → 3")
    assert " … " in last
    assert len(last) < 440


@pytest.mark.parametrize("limit", [5, 6, 7])
def test_a_prompt_is_kept_up_to_its_limit(tmp_path: Path, limit: int) -> None:
    path = write(tmp_path / "rows.jsonl", [{"prompt": "abcd"}, {"prompt": "a"}])
    _, _, first, *_ = lines_of([{"name": "jsonl", "path": path, "max_prompt_tokens": limit}])
    assert cells(first)[2] == ("1" if limit < 6 else "2")
