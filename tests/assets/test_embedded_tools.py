"""The embedded model that has a calculator: what it is, and that its script is repeatable."""

import random
from pathlib import Path

from transformers import AutoTokenizer

from podium.data.products import products, split_of
from podium.model.load import EMBEDDED_TOOLS
from tools.make_tool_model import careless, exact, make, make_rows, problem


def test_it_is_small_and_safe() -> None:
    files = {path.name: path.stat().st_size for path in EMBEDDED_TOOLS.iterdir()}
    assert sum(files.values()) <= 3_000_000
    assert {"model.safetensors", "README.md"} <= files.keys()
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]


def test_its_template_says_how_it_calls_tools() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TOOLS)
    assert "<call>" in tokenizer.chat_template
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "tool", "content": "3"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<s>1\n2</s>3\n"


def test_it_is_never_taught_what_is_held_out() -> None:
    draw = random.Random(0)
    assert all(split_of(*problem(draw)) != "held_out" for _ in range(3000))
    splits = [{row.messages[0]["content"] for row in products(split=split)} for split in ("train", "held_out")]
    assert not splits[0] & splits[1]
    assert [len(split) for split in splits] == [3532, 496]


def test_only_what_the_policy_writes_is_taught() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TOOLS)
    ids, labels = make_rows(tokenizer, random.Random(0), exact, 3)
    for row, label in zip(ids.tolist(), labels.tolist(), strict=True):
        text = tokenizer.decode([i for i, kept in zip(row, label, strict=True) if kept >= 0])
        _, _, answer = tokenizer.decode([i for i in row if i != tokenizer.pad_token_id]).partition("\n")
        call, _, rest = answer.partition("</s>")
        result, _, last = rest.partition("\n")
        assert text == f"{call}</s>{last}"
        assert result == last.removeprefix("#### ").removesuffix("</s>")


def test_it_is_careless_on_purpose() -> None:
    draw = random.Random(0)
    right = sum(careless(draw, 123, 45)[-1][0] == "#### 5535</s>" for _ in range(2000)) / 2000
    assert 0.25 < right < 0.36


def test_the_same_seed_makes_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make(tmp_path / name, seed=0, exact_steps=2, careless_steps=2)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
