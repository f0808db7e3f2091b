"""A trained run to export, and greedy answers by libraries that know nothing of Podium."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.run.start import train
from podium.settings.tables import Settings
from tests.conftest import small_tables

QUESTIONS = [f"What is {a} {sign} {b}?" for a, b in ((12, 34), (57, 8), (90, 45), (33, 33)) for sign in "+-"]


def trained_run(folder: Path, **tables: Any) -> Path:
    """Enough steps for the adapter to change answers."""
    made = small_tables(folder / "run", steps=8, prompts_per_step=8)
    made |= {"eval": {"every": 4, "data": [{"name": "arithmetic", "split": "held_out", "max_rows": 16}]}}
    made |= {"checkpoint": {"every": 4}}
    train(Settings.from_dict(made | tables))
    return folder / "run"


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    turns = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]


@torch.no_grad()
def greedy(model: Any, tokenizer: Any) -> list[list[int]]:
    """By transformers' own generate."""
    answers = []
    for question in QUESTIONS:
        ids = torch.tensor([prompt_ids(tokenizer, question)])
        written = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        answers.append(written[0, ids.shape[1] :].tolist())
    return answers


def plain_model(folder: Path) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
