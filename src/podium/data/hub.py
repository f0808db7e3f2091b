"""Data from Hugging Face `datasets`: a hub name, a folder, or a parquet, JSON, CSV or Arrow file.

In: a path and a split. Out: rows, from the columns that `jsonl.py` describes; an empty cell counts as a missing
column. Columns with images, audio and the like are left out. Local files are read without leaving a cache; what comes
from the hub stays in the library's own cache.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from pydantic import Field

from podium.data.jsonl import AnswerColumn, Columns, PromptColumn, Remap, RewardColumn, read_rows
from podium.errors import InputError, first_line
from podium.model.hub import hub_is_reachable
from podium.records import Row

FORMATS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv", ".arrow": "arrow"}
"""File name's end → the library's reader."""


def hub(
    *,
    path: Annotated[str, Field(min_length=1, description="hub name such as openai/gsm8k, folder or file")],
    split: Annotated[str, Field(min_length=1, description="split, or a slice of it such as train[:10%]")] = "train",
    config: Annotated[str | None, Field(description="name of the configuration, if the dataset has several")] = None,
    prompt_column: PromptColumn = None,
    answer_column: AnswerColumn = None,
    reward_column: RewardColumn = None,
    remap: Remap = {},  # noqa: B006
) -> list[Row]:
    """Every row of the split, in order."""
    if find_spec("datasets") is None:
        raise InputError("data.name = 'hub' needs the package datasets: pip install datasets")
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    with TemporaryDirectory() as scratch:
        try:
            table = _load(datasets, path, split, config, scratch)
        except InputError:
            raise
        except Exception as error:  # the libraries raise anything for a broken file or an unknown name
            raise InputError(f"data.path = {path!r}, split {split!r} cannot be loaded: {_reason(error)}") from None
        names = [name for name, kind in table.features.items() if not hasattr(kind, "decode_example")]
        numbered = enumerate(table.select_columns(names), start=1)
        columns = Columns(prompt_column, answer_column, reward_column, remap)
        return read_rows(f"{path} ({split})", numbered, columns, _without_empty)


def _without_empty(row: dict[str, Any]) -> dict[str, Any]:
    """Drops the columns that a row does not have: a table stores them as None."""
    return {name: _plain(value) for name, value in row.items() if value is not None}


def _plain(value: Any) -> Any:
    """Turns dates and bytes into text: rewards get plain data, and an unused column must not stop a run."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def _load(datasets: Any, path: str, split: str, config: str | None, scratch: str) -> Any:
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix not in FORMATS:
            raise InputError(f"data.path = {path!r}: a file must end in one of {', '.join(FORMATS)}")
        if config is not None:
            raise InputError(f"data.config = {config!r} has no effect on a single file; remove it")
        return datasets.load_dataset(FORMATS[place.suffix], data_files=str(place), split=split, cache_dir=scratch)
    if (place / "state.json").is_file() or (place / "dataset_dict.json").is_file():
        return _saved(datasets, place, split, config)
    if place.is_dir():
        return datasets.load_dataset(str(place), config, split=split, cache_dir=scratch)
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise InputError(f"data.path = {path!r}: no such file or folder")
    if not _is_cached(datasets, path) and not hub_is_reachable():
        raise InputError(f"data.path = {path!r} is not a file or folder here, and the hub cannot be reached")
    return datasets.load_dataset(path, config, split=split)


def _saved(datasets: Any, folder: Path, split: str, config: str | None) -> Any:
    """A folder that `save_to_disk` wrote: one table, or one for each split."""
    if config is not None:
        raise InputError(f"data.config = {config!r} has no effect on a folder that save_to_disk wrote; remove it")
    saved = datasets.load_from_disk(str(folder), keep_in_memory=True)
    tables = saved if isinstance(saved, dict) else {"train": saved}
    if split not in tables:
        raise InputError(f"data.split = {split!r} is not in {folder}; it has: {', '.join(tables)}")
    return tables[split]


def _is_cached(datasets: Any, name: str) -> bool:
    return (Path(datasets.config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()


def _reason(error: BaseException) -> str:
    """The first line of the innermost error: the library's outer error only says that something failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
