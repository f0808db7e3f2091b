"""A corpus of bad rows and settings, through the command line: one message that names row or field, exit code 2, no
traceback, nothing written, within seconds."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

import podium.runtime.local  # noqa: F401  importing torch is not part of a refusal's time
from podium import cli
from tests import commands

MAX_S = 5.0

SETTINGS = """
[run]
folder = "run"
steps = 1
prompts_per_step = 2
rollouts_per_prompt = 2
[model]
device = "cpu"
[rollout]
max_new_tokens = 16
"""
REWARD = '[[reward]]\nname = "exact"\n'
GOOD = b'{"prompt": "What is 1 + 1?", "answer": "2"}\n'


def row(**columns: Any) -> bytes:
    return json.dumps(columns).encode() + b"\n"


def turns(*given: Any) -> bytes:
    return row(messages=list(given))


USER = {"role": "user", "content": "a"}

BAD_FILES: dict[str, tuple[bytes, str]] = {
    # what the file holds → what the message must say; the bad row is the second where there are several
    "not JSON": (GOOD + b"What is 1 + 1?\n", "row 2: Expecting value"),
    "cut in the middle": (GOOD + b'{"prompt": "Wha', "row 2: Unterminated string"),
    "a trailing comma": (GOOD + b'{"prompt": "a",}\n', "row 2: "),
    "single quotes": (GOOD + b"{'prompt': 'a'}\n", "row 2: "),
    "two objects on a line": (GOOD + b'{"prompt": "a"} {"prompt": "b"}\n', "row 2: Extra data"),
    "one JSON list of all rows": (b'[{"prompt": "a"}, {"prompt": "b"}]\n', "row 1: expected an object, found list"),
    "a number": (GOOD + b"7\n", "row 2: expected an object, found int"),
    "null": (GOOD + b"null\n", "row 2: expected an object, found NoneType"),
    "a text": (GOOD + b'"What?"\n', "row 2: expected an object, found str"),
    "NaN": (GOOD + b'{"prompt": "a", "answer": NaN}\n', "row 2: NaN is not a JSON value"),
    "infinity": (GOOD + b'{"prompt": "a", "answer": -Infinity}\n', "row 2: -Infinity is not a JSON value"),
    "a number too large": (GOOD + b'{"prompt": "a", "answer": 1e400}\n', "row 2: the number 1e400 is too large"),
    "an integer of 5000 digits": (GOOD + b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}\n", "row 2: Exceeds"),
    "a key twice": (GOOD + b'{"prompt": "a", "prompt": "b"}\n', "row 2: 'prompt' is given twice"),
    "100,000 brackets": (GOOD + b'{"prompt": "a", "x": ' + b"[" * 100_000 + b"\n", "row 2: nested too deeply"),
    "an empty file": (b"", "data: the sources hold no rows"),
    "blank lines only": (b"\n \n\t\n", "data: the sources hold no rows"),
    "UTF-16": (GOOD.decode().encode("utf-16"), "is UTF-16 text; save it as UTF-8"),
    "latin-1": (GOOD + '{"prompt": "é"}\n'.encode("latin-1"), "row 2: 'utf-8' codec can't decode"),
    "a zip file": (b"PK\x03\x04\x14\x00\x08\x08\x08\x00\xff\xfe", "row 1: 'utf-8' codec can't decode"),
    "a NUL byte": (GOOD + b'{"prompt": "a\x00b"}\n', "row 2: Invalid control character"),
    "an escaped NUL": (GOOD + row(prompt="a\0b"), "row 2: 'prompt' holds a NUL character"),
    "half a surrogate pair": (GOOD + b'{"prompt": "\\ud83d"}\n', "row 2: 'utf-8' codec can't encode"),
    "half a surrogate pair in the answer": (GOOD + b'{"prompt": "a", "answer": "\\udc00"}\n', "row 2: 'utf-8' codec"),
    "5 MB in one prompt": (GOOD + row(prompt="a" * 5_000_000), "row 2: 'prompt' has 5,000,000 characters"),
    "no prompt column": (GOOD + row(text="a"), "row 2: has none of 'messages', 'prompt', 'question'"),
    "an empty object": (GOOD + b"{}\n", "row 2: has none of"),
    "an empty prompt": (GOOD + row(prompt=""), "row 2: 'prompt' must be a text that is not empty"),
    "a blank prompt": (GOOD + row(prompt=" \n\t"), "row 2: 'prompt' must be a text that is not empty"),
    "a null prompt": (GOOD + row(prompt=None), "row 2: 'prompt' must be a text that is not empty, not None"),
    "a number for a prompt": (GOOD + row(question=12), "row 2: 'question' must be a text that is not empty, not 12"),
    "an object for a prompt": (GOOD + row(prompt={"text": "a"}), "row 2: 'prompt' must be a text"),
    "no turns": (GOOD + row(messages=[]), "row 2: 'messages' must be a list with at least one turn"),
    "a text for turns": (GOOD + row(messages="a"), "row 2: 'messages' must be a list with at least one turn"),
    "a turn that is a text": (GOOD + turns("a"), "row 2: a turn needs a 'role'"),
    "a turn without a role": (GOOD + turns({"content": "a"}), "row 2: a turn needs a 'role'"),
    "an unknown role": (GOOD + turns({"role": "human", "content": "a"}), "row 2: a turn needs a 'role' out of system"),
    "a turn without content": (GOOD + turns({"role": "user"}), "row 2: 'content' must be a text"),
    "a turn with empty content": (GOOD + turns(USER | {"content": ""}), "row 2: 'content' must be a text"),
    "content in parts": (GOOD + turns(USER | {"content": [{"type": "text"}]}), "row 2: 'content' must be a text"),
    "answers only": (GOOD + turns({"role": "assistant", "content": "a"}), "row 2: 'messages' has no turn to answer"),
    "an unknown reward": (GOOD + row(prompt="a", reward="exactly"), "row 2 of jsonl: reward 'exactly' is not known"),
    "a number for a reward": (GOOD + row(prompt="a", reward=1.0), "row 2: 'reward' must be a name or a list of names"),
    "an empty reward": (GOOD + row(prompt="a", dataset=""), "row 2: 'reward' must be a name or a list of names"),
    "a reward that cannot be imported": (GOOD + row(prompt="a", reward="no_module:x"), "cannot be imported"),
    "every row with a reward of its own": (row(prompt="a", reward="arithmetic"), "reward 'exact' has no effect"),
    "all prompts too long": (row(prompt="a" * 600), "data: none of the 1 prompts fits"),
}

SOURCE = '[[data]]\nname = "jsonl"\npath = "rows.jsonl"\n'
HUB = '[[data]]\nname = "hub"\n'
GYM = '[[data]]\nname = "reasoning_gym"\n'

BAD_SETTINGS: dict[str, tuple[str, str]] = {
    # the settings' data tables and what else → what the message must say
    "no path": ('[[data]]\nname = "jsonl"\n', "data[0].path is required"),
    "a number for a path": ('[[data]]\nname = "jsonl"\npath = 3\n', "data[0].path = 3: input should be a valid string"),
    "a path that is not there": ('[[data]]\nname = "jsonl"\npath = "no.jsonl"\n', "'no.jsonl': no such file"),
    "a folder for a file": ('[[data]]\nname = "jsonl"\npath = "."\n', "data.path = '.': no such file"),
    "a NUL in a path": ('[[data]]\nname = "jsonl"\npath = "a\\u0000b"\n', "data.path = 'a\\x00b'"),
    "a URL that does not answer": (
        '[[data]]\nname = "jsonl"\npath = "http://127.0.0.1:1/a"\n',
        "data.path = 'http://127.0.0.1:1/a' cannot be read: [Errno 111] Connection refused",
    ),
    "an unknown source": ('[[data]]\nname = "jsonll"\n', "data.name = 'jsonll' is not known; did you mean 'jsonl'?"),
    "an unknown option": (SOURCE + "shuffle = true\n", "data[0].shuffle is not an option of jsonl"),
    "a column that is not there": (SOURCE + 'answer_column = "gold"\n', "row 1: has no 'gold'; it has: 'answer'"),
    "one table for several": ('[data]\nname = "jsonl"\npath = "rows.jsonl"\n', "[data] must be written [[data]]"),
    "max_rows of 0": (SOURCE + "max_rows = 0\n", "data.0.max_rows = 0: input should be greater than or equal to 1"),
    "half a row": (SOURCE + "max_rows = 1.5\n", "data.0.max_rows = 1.5: input should be a valid integer"),
    "a limit below 0": (SOURCE + "max_prompt_tokens = -5\n", "data.0.max_prompt_tokens = -5: input should be greater"),
    "a weight below 0": (SOURCE + "weight = -1\n", "data.0.weight = -1: input should be greater than 0"),
    "a weight that is no number": (SOURCE + "weight = nan\n", "data.0.weight = nan: input should be a finite number"),
    "the only weight": (SOURCE + "weight = 2\n", "data[0].weight has no effect on the only table"),
    "weight and rows": (SOURCE + "weight = 2\nrows = 1\n" + SOURCE, "data[0].weight and data[0].rows both"),
    "half the weights": (SOURCE + "weight = 2\n" + SOURCE, "data[1] has no weight and data[0] has one"),
    "no rows": (SOURCE + "rows = 0\n", "data.0.rows = 0: give a number of rows"),
    "rows as a text": (SOURCE + 'rows = "all"\n', "data.0.rows = 'all': give a number of rows"),
    "more rows than there are": (SOURCE + "rows = 9\n", "data[0].rows = 9: jsonl has 1 rows that are not too long"),
    "rows of the held-out data": (SOURCE + "[[eval.data]]\nrows = 3\n", "eval.data[0].rows has no effect"),
    "an unknown file for hub": (HUB + 'path = "./no.parquet"\n', "data.path = './no.parquet': no such file or folder"),
    "a file that hub cannot read": (HUB + 'path = "bad.toml"\n', "a file must end in one of .parquet"),
    "a bad split": (HUB + 'path = "rows.jsonl"\nsplit = "dev"\n', 'Unknown split "dev". Should be one of'),
    "an empty split": (HUB + 'path = "rows.jsonl"\nsplit = ""\n', "data[0].split = ''"),
    "a config where there is none": (HUB + 'path = "rows.jsonl"\nconfig = "main"\n', "data.config = 'main' has"),
    "a hub that is not there": (HUB + 'path = "nobody/nothing"\n', "data.path = 'nobody/nothing' is not a file"),
    "an unknown task": (GYM + 'task = "chain_sums"\n', "data.task = 'chain_sums' is not a task of"),
    "no task": (GYM, "data[0].task is required"),
    "a task of size 0": (GYM + 'task = "chain_sum"\nsize = 0\n', "data[0].size = 0: input should be greater"),
    "an unknown option of a task": (
        GYM + 'task = "chain_sum"\nconfig = { terms = 3 }\n',
        "data.config.terms is not an option of chain_sum; valid: ",
    ),
    "an option of a task that makes no sense": (
        GYM + 'task = "chain_sum"\nconfig = { min_terms = 9 }\n',
        "cannot make its rows: max_terms must be >= min_terms",
    ),
    "a split that arithmetic has not": ('[[data]]\nsplit = "test"\n', "data[0].split = 'test': input should be"),
    "a section that is none": (SOURCE + "[dataset]\nx = 1\n", "dataset is not a setting; valid here: "),
    "a number for a table": ("data = 3\n", "data = 3: input should be a valid list"),
    "a number for a source": ("data = [3]\n", "data.0 = 3: input should be a valid dictionary"),
    "an unknown reward": (SOURCE + '[[reward]]\nname = "exactly"\n', "reward.name = 'exactly' is not known"),
    "an unknown option of a reward": (SOURCE + REWARD + "strict = true\n", "reward[0].strict is not an option"),
    "a key that does not exist": (SOURCE + "[filter]\nrefil = true\n", "filter.refil is not a setting; valid here: "),
    "a value out of range": (SOURCE + "[filter]\nretire_pass_rate = 2.0\n", "filter.retire_pass_rate = 2.0: input"),
    "TOML that is none": (SOURCE + "steps = = 3\n", "bad.toml is not valid TOML: "),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with one good row; the hub is a port at which nothing listens."""
    monkeypatch.chdir(tmp_path)
    for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    (tmp_path / "rows.jsonl").write_bytes(GOOD)
    return tmp_path


def refused(here: Path, capfd: pytest.CaptureFixture[str], command: str) -> str:
    """The message of a command that must be refused."""
    before = sorted(path.name for path in here.iterdir())
    started = time.process_time()  # other programs on the machine do not count
    assert cli.main([command, "bad.toml"]) == 2
    assert time.process_time() - started < MAX_S
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("podium: ")
    assert "Traceback" not in err
    assert err.count("podium: ") == 1
    assert sorted(path.name for path in here.iterdir()) == before
    return err


def test_the_good_row_is_good(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Or every refusal below could have another cause."""
    (here / "bad.toml").write_text(SETTINGS + SOURCE + REWARD)
    assert cli.main(["check", "bad.toml"]) == 0


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(("content", "message"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_rows_are_told(
    here: Path, capfd: pytest.CaptureFixture[str], content: bytes, message: str, command: str
) -> None:
    (here / "rows.jsonl").write_bytes(content)
    (here / "bad.toml").write_text(SETTINGS + SOURCE + REWARD)
    assert message in refused(here, capfd, command)


@pytest.mark.parametrize("command", ["check", "train"])
@pytest.mark.parametrize(("tables", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS)
def test_bad_settings_are_told(
    here: Path, capfd: pytest.CaptureFixture[str], tables: str, message: str, command: str
) -> None:
    top = tables if tables.startswith("data =") else ""
    rest = "" if top else tables
    reward = "" if "[[reward]]" in tables else REWARD
    (here / "bad.toml").write_text(top + SETTINGS + rest + reward)
    told = refused(here, capfd, command)
    assert message in told
    if "bad row" not in told:
        assert len(told.splitlines()) == 1


def test_the_corpus_has_the_size_that_is_asked_for() -> None:
    assert len(BAD_FILES) + len(BAD_SETTINGS) >= 40


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_process_that_is_given_bad_rows_ends_with_2(here: Path, command: str) -> None:
    (here / "rows.jsonl").write_bytes(BAD_FILES["half a surrogate pair"][0])
    (here / "bad.toml").write_text(SETTINGS + SOURCE + REWARD)
    done = commands.podium(command, "bad.toml", folder=here)
    assert (done.returncode, done.stdout) == (2, "")
    first, second = done.stderr.splitlines()
    assert first == "podium: rows.jsonl has 1 bad row; fix or remove it:"
    assert second.startswith("  row 2: ")
