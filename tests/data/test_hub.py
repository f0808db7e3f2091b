"""The real library on files of this machine; the hub itself is not needed."""

import json
import math
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import datasets
import pytest

from podium.data.hub import hub
from podium.errors import InputError
from podium.records import Row

ROWS = [{"question": f"What is 1 + {n}?", "answer": str(1 + n), "level": n} for n in range(4)]
EXPECTED = [Row.from_text(row["question"], answer=row["answer"], metadata={"level": row["level"]}) for row in ROWS]


def table(rows: list[dict[str, Any]] = ROWS) -> datasets.Dataset:
    return datasets.Dataset.from_list(rows)


def write(folder: Path, form: str) -> str:
    """ROWS in that form; the path to give."""
    data, path = table(), folder / f"rows.{form}"
    if form == "parquet":
        data.to_parquet(path)
    elif form in ("json", "jsonl"):
        data.to_json(path)
    elif form == "csv":
        data.to_csv(path)
    elif form == "saved":
        data.save_to_disk(str(path))
    elif form == "saved splits":
        datasets.DatasetDict({"train": data, "test": table(ROWS[:1])}).save_to_disk(str(path))
    else:
        path.mkdir()
        data.to_parquet(path / "train.parquet")
        table(ROWS[:1]).to_parquet(path / "test.parquet")
    return str(path)


@pytest.mark.parametrize("form", ["parquet", "json", "jsonl", "saved", "saved splits", "folder"])
def test_rows_are_the_same_from_every_kind_of_file(tmp_path: Path, form: str) -> None:
    assert hub(path=write(tmp_path, form)) == EXPECTED


def test_numbers_of_a_csv_file_are_numbers(tmp_path: Path) -> None:
    assert [row.answer for row in hub(path=write(tmp_path, "csv"))] == [1, 2, 3, 4]


@pytest.mark.parametrize(("form", "split"), [("folder", "test"), ("saved splits", "test"), ("parquet", "train[:1]")])
def test_a_split_chooses_the_rows(tmp_path: Path, form: str, split: str) -> None:
    assert hub(path=write(tmp_path, form), split=split) == EXPECTED[:1]


def test_local_files_leave_no_cache_behind_and_are_read_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    path = write(tmp_path, "json")
    assert len(hub(path=path)) == 4
    table(ROWS[:2]).to_json(path)
    assert len(hub(path=path)) == 2
    assert not cache.exists() or not list(cache.rglob("*.arrow"))


def test_a_cell_that_is_empty_counts_as_a_missing_column(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Why?"}]
    table([{"prompt": "a", "messages": None}, {"prompt": None, "messages": turns}]).to_parquet(tmp_path / "a.parquet")
    assert hub(path=f"{tmp_path}/a.parquet") == [Row.from_text("a"), Row.from_text("Why?")]


def test_columns_can_be_named(tmp_path: Path) -> None:
    table([{"problem": "Why?", "gold": "so", "kind": "exact"}]).to_parquet(tmp_path / "a.parquet")
    named = {"prompt_column": "problem", "answer_column": "gold", "reward_column": "kind"}
    assert hub(path=f"{tmp_path}/a.parquet", **named) == [Row.from_text("Why?", answer="so", reward=("exact",))]


def test_pictures_are_left_out(tmp_path: Path) -> None:
    features = datasets.Features({"prompt": datasets.Value("string"), "picture": datasets.Image()})
    rows = [{"prompt": "a", "picture": {"bytes": b"no picture", "path": None}}]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    assert hub(path=f"{tmp_path}/a.parquet") == [Row.from_text("a")]


def test_bad_rows_are_told_with_their_numbers(tmp_path: Path) -> None:
    table([{"prompt": "a"}, {"prompt": " "}, {"prompt": None}]).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError) as caught:
        hub(path=f"{tmp_path}/a.parquet")
    assert str(caught.value) == (
        f"{tmp_path}/a.parquet (train) has 2 bad rows; fix or remove them:\n"
        "  row 2: 'prompt' must be a text that is not empty, not ' '\n"
        "  row 3: has none of 'messages', 'prompt', 'question'"
    )


def broken(folder: Path, name: str, content: bytes = b"") -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


REFUSED = {
    "a file that is not there": (lambda folder: {"path": f"{folder}/none.parquet"}, "no such file or folder"),
    "a kind of file that it cannot read": (
        lambda folder: {"path": broken(folder, "rows.xlsx")},
        "a file must end in one of .parquet, .json, .jsonl, .csv, .arrow",
    ),
    "broken parquet": (lambda folder: {"path": broken(folder, "a.parquet", b"PAR1")}, "cannot be loaded: "),
    "broken JSON": (lambda folder: {"path": broken(folder, "a.json", b'{"prompt": ')}, "cannot be loaded: "),
    "an empty folder": (lambda folder: {"path": str(folder)}, "cannot be loaded: "),
    "an unknown split": (
        lambda folder: {"path": write(folder, "parquet"), "split": "dev"},
        "split 'dev' cannot be loaded: Unknown split \"dev\". Should be one of ['train'].",
    ),
    "an unknown split of a saved folder": (
        lambda folder: {"path": write(folder, "saved splits"), "split": "dev"},
        "data.split = 'dev' is not in",
    ),
    "a split that is none": (
        lambda folder: {"path": write(folder, "parquet"), "split": "train[::"},
        "cannot be loaded",
    ),
    "a config of a file": (
        lambda folder: {"path": write(folder, "parquet"), "config": "main"},
        "data.config = 'main' has no effect on a single file",
    ),
    "a config of a saved folder": (
        lambda folder: {"path": write(folder, "saved"), "config": "main"},
        "data.config = 'main' has no effect on a folder that save_to_disk wrote",
    ),
    "an unknown config": (lambda folder: {"path": write(folder, "folder"), "config": "main"}, "cannot be loaded: "),
}


@pytest.mark.parametrize(("make", "complaint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_loaded_is_one_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], make: Any, complaint: str
) -> None:
    options = make(tmp_path)
    capfd.readouterr()
    with pytest.raises(InputError) as caught:
        hub(**options)
    assert complaint in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert capfd.readouterr() == ("", "")


def test_a_hub_that_cannot_be_reached_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    started = time.monotonic()
    with pytest.raises(InputError) as caught:
        hub(path="nobody/has-this")
    assert str(caught.value) == (
        "data.path = 'nobody/has-this' is not a file or folder here, and the hub cannot be reached"
    )
    assert time.monotonic() - started < 60  # retries of the hub's own library take minutes


def test_without_the_package_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podium.data.hub.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs the package datasets: pip install datasets"):
        hub(path=str(tmp_path))


def test_the_package_is_not_loaded_by_naming_the_source() -> None:
    code = "import sys; from podium.settings.lookup import find; find('data', 'hub'); print('datasets' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_cells_that_are_no_plain_data_become_texts(tmp_path: Path) -> None:
    when = datetime(2026, 1, 2, 3, 4, 5)
    rows = [{"prompt": "a", "answer": 1.5, "when": when, "days": [when.date()], "raw": b"\x01", "odd": math.nan}]
    table(rows).to_parquet(tmp_path / "a.parquet")
    [row] = hub(path=f"{tmp_path}/a.parquet")
    assert row.answer == 1.5
    assert row.metadata == {"when": "2026-01-02 03:04:05", "days": ["2026-01-02"], "raw": "01", "odd": "nan"}
    assert json.loads(json.dumps(row.metadata)) == row.metadata
