"""`ifeval` against the published checkers: 2,500 verdicts and 2,500 counts of sentences and words in capitals.

`benchmarks/ifeval_agreement.py` recorded them and says with which versions.
"""

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from podium.reward.instructions.english import count_capital_words, count_sentences
from podium.reward.instructions.ifeval import INSTRUCTIONS
from podium.reward.instructions.tulu3 import FUNCTIONS
from podium.settings.lookup import find
from tests.builders import make_prompt, make_rollout

CASES: dict[str, list[list[Any]]] = defaultdict(list)
for line in gzip.decompress(Path(__file__).with_name("ifeval_published.jsonl.gz").read_bytes()).decode().splitlines():
    name, *case = json.loads(line)
    CASES[name].append(case)


def test_there_are_cases_of_every_instruction_and_function() -> None:
    assert {*CASES} == {*INSTRUCTIONS, *FUNCTIONS, "counts"}
    verdicts = {name: [case[2] for case in cases] for name, cases in CASES.items()}
    assert all(len(each) == 50 and {True, False} == set(each) for name, each in verdicts.items() if name != "counts")


@pytest.mark.parametrize("name", sorted({*INSTRUCTIONS, *FUNCTIONS}))
def test_a_verdict_is_the_published_one(name: str) -> None:
    for arguments, text, published in CASES[name]:
        label = {"func_name": name, **arguments} if name in FUNCTIONS else None
        label = label or {"instruction_id_list": [name], "kwargs": [arguments]}
        value = find("reward", "ifeval")(make_prompt(answer=label), make_rollout(text))
        assert value == published, (arguments, text)


def test_sentences_and_words_in_capitals_are_counted_as_published() -> None:
    assert len(CASES["counts"]) == 2500
    for _, text, published in CASES["counts"]:
        assert [count_sentences(text), count_capital_words(text)] == published, text
