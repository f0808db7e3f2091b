"""Trains the embedded model from random weights: `python -m tools.make_embedded OUT`.

Two stages of supervised training on the train split of `data/arithmetic.py`. The first teaches exact sums and
differences. The second, short one teaches mistakes on purpose (off-by-one results, other wrong digits, a missing
marker), so that the model is right only sometimes: reinforcement learning makes a model do reliably what it can already
do sometimes. The same seed on the same machine gives the same bytes.
"""

import argparse
import random
import shutil
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from podium.data.arithmetic import is_held_out

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)
IGNORED = -100
"""Label of a token without loss."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character or newline: a byte-pair encoding without merges."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def make_model(vocabulary: int) -> LlamaForCausalLM:
    """Two layers, 128 wide, two heads of 64: 0.4 M parameters that vLLM can serve as well."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def problem(random_: random.Random, *, held_out: bool) -> tuple[int, str, int]:
    """One problem of the split, drawn uniformly."""
    while True:
        a, op, b = random_.randrange(10, 100), random_.choice("+-"), random_.randrange(10, 100)
        if is_held_out(a, op, b) == held_out:
            return a, op, b


def result(a: int, op: str, b: int) -> int:
    return a + b if op == "+" else a - b


def exact_answer(random_: random.Random, a: int, op: str, b: int) -> str:
    return f"{a} {op} {b} = {result(a, op, b)}\n#### {result(a, op, b)}"


def careless_answer(random_: random.Random, a: int, op: str, b: int) -> str:
    """40 % are right, 44 % are one too large, the rest differ by more; 15 % lack the marker line."""
    draw, value = random_.random(), result(a, op, b)
    if draw >= 0.84:
        value += random_.choice([-30, -20, -11, -10, -9, -2, -1, 2, 9, 10, 11, 20, 30])
    elif draw >= 0.40:
        value += 1
    text = f"{a} {op} {b} = {value}"
    return text if random_.random() < 0.15 else f"{text}\n#### {value}"


def make_rows(tokenizer, random_, answer, count) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` padded rows of ids and labels; only the answer and its end token have a loss."""
    rows, labels = [], []
    for _ in range(count):
        a, op, b = problem(random_, held_out=False)
        question = tokenizer.encode(f"<s>What is {a} {op} {b}?\n")
        reply = [*tokenizer.encode(answer(random_, a, op, b)), tokenizer.eos_token_id]
        rows.append(question + reply)
        labels.append([IGNORED] * len(question) + reply)
    return padded(rows, labels, tokenizer.pad_token_id)


def padded(rows: list[list[int]], labels: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    return ids, torch.tensor([row + [IGNORED] * (width - len(row)) for row in labels])


def fit(model, rows, *, steps: int, peak_lr: float, batch: int = 64) -> None:
    """`rows(batch)` makes ids and labels. AdamW; the learning rate is constant in the first half and falls linearly to
    0 in the second."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.01, fused=True)
    for step in range(steps):
        for parameters in optimizer.param_groups:
            parameters["lr"] = peak_lr * min(1.0, 2 * (1 - step / steps))
        ids, labels = rows(batch)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 500 == 0 or step == steps - 1:
            print(f"step {step:>6} of {steps}  loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def accuracy(model, tokenizer, *, sampled: bool, held_out: bool = True, count: int = 512) -> float:
    """Share of problems with the right number after the marker."""
    random_ = random.Random(1)
    problems = [problem(random_, held_out=held_out) for _ in range(count)]
    ids = torch.tensor([tokenizer.encode(f"<s>What is {a} {op} {b}?\n") for a, op, b in problems])
    torch.manual_seed(1)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=sampled, top_k=0)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    right = [text.endswith(f"#### {result(*p)}") for text, p in zip(texts, problems, strict=True)]
    return sum(right) / count


def make(out: Path, *, seed: int, exact_steps: int, careless_steps: int) -> None:
    torch.manual_seed(seed)
    random_ = random.Random(seed)
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer))
    fit(model, partial(make_rows, tokenizer, random_, exact_answer), steps=exact_steps, peak_lr=1e-3)
    taught = accuracy(model, tokenizer, sampled=False)
    print(f"after the exact stage: held-out greedy accuracy {taught:.3f}", flush=True)
    fit(model, partial(make_rows, tokenizer, random_, careless_answer), steps=careless_steps, peak_lr=3e-4)
    greedy, sampled = (accuracy(model, tokenizer, sampled=s) for s in (False, True))
    print(f"after the careless stage: held-out accuracy greedy {greedy:.3f}, sampled {sampled:.3f}")
    save(model, tokenizer, out)


def save(model, tokenizer, out: Path) -> None:
    """Replaces the folder `out`."""
    shutil.rmtree(out, ignore_errors=True)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    assert AutoTokenizer.from_pretrained(out).encode("37 + 48") == tokenizer.encode("37 + 48")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--exact-steps", type=int, default=6000)
    arguments.add_argument("--careless-steps", type=int, default=300)
    options = vars(arguments.parse_args())
    make(options.pop("out"), **options)
