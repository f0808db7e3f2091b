"""Tokenizers built like those of well-known families of models, small enough to be trained in a moment."""

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from podium.model.hub import smollm2_folder
from podium.model.load import EMBEDDED

CORPUS = [
    "Think first, inside <think> and </think>, then answer the user with a number such as 42 or 1,000.",
    "system user assistant You are a helpful assistant. What is 17 + 25? The answer is 42.\n\n",
    "A conversation between User and Assistant. <tool_call> {'name': 'add'} </tool_call>  two  spaces",
]

QWEN_TEMPLATE = """{%- for m in messages -%}
{%- set text = m.content -%}
{%- if m.role == 'assistant' and '</think>' in text -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' + text + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}"""
LLAMA_TEMPLATE = """{{- bos_token }}{%- for m in messages -%}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""
INST_TEMPLATE = """{{- bos_token -}}{%- for m in messages -%}
{%- if m['role'] == 'assistant' -%}{{- ' ' + m['content'] | trim + ' ' + eos_token -}}
{%- else -%}{{- '[INST] ' + m['content'] | trim + ' [/INST]' -}}{%- endif -%}
{%- endfor -%}"""
PHI_TEMPLATE = """{%- for m in messages -%}
{{- '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"""


def special(*names: str, **rules: bool) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False, **rules) for name in names]


def word(*names: str) -> list[AddedToken]:
    return [AddedToken(name, special=False, normalized=False) for name in names]


def wrapped(backend: Tokenizer, template: str, added: list[AddedToken], **named: str) -> Any:
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    made.add_tokens(added)
    made.chat_template = template
    return made


def byte_level(split: str | None = None) -> Tokenizer:
    """As GPT-2 and its heirs: bytes, with merges."""
    backend = Tokenizer(models.BPE())
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    by_rule = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*by_rule, bytes_])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return backend


def sentencepiece_like(prepend: str | None) -> Tokenizer:
    """Spaces are ▁. A first space is put before the text (`first`), before every piece (`always`), or, with None, by a
    normalizer, as in older conversions."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if prepend is None:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", *fallback])
    backend.train_from_iterator(CORPUS, trainer)
    written = json.loads(backend.to_str())
    return Tokenizer.from_str(json.dumps({**written, "added_tokens": []}))  # the byte tokens are no added ones


def qwen() -> Any:
    added = special("<|im_start|>", "<|im_end|>") + word("<think>", "</think>", "<tool_call>", "</tool_call>")
    return wrapped(byte_level(), QWEN_TEMPLATE, added, pad_token="<|endoftext|>", eos_token="<|im_end|>")


def thinking_qwen() -> Any:
    """As QwQ and the R1 distillations: the generation prompt begins the thinking."""
    made = qwen()
    made.chat_template = QWEN_TEMPLATE + "<think>\n"
    return made


def llama3() -> Any:
    added = special("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|reserved_special_token_0|>")
    return wrapped(
        byte_level(r"\p{L}+| ?\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+"),
        LLAMA_TEMPLATE,
        added,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
    )


def llama2(prepend: str | None, eos: str = "</s>") -> Any:
    return wrapped(
        sentencepiece_like(prepend), INST_TEMPLATE, word("[TOOL]"), bos_token="<s>", eos_token=eos, unk_token="<unk>"
    )


def phi3(eos: str = "<|endoftext|>") -> Any:
    """Its special tokens take the white space behind them."""
    added = special("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", rstrip=True)
    return wrapped(sentencepiece_like(None), PHI_TEMPLATE, added, bos_token="<s>", eos_token=eos)


def embedded() -> Any:
    return AutoTokenizer.from_pretrained(EMBEDDED)


def smollm2() -> Any:
    return AutoTokenizer.from_pretrained(smollm2_folder())


FAMILIES = {
    "qwen": qwen,
    "thinking_qwen": thinking_qwen,
    "llama3": llama3,
    "llama2_first": lambda: llama2("first"),
    "llama2_always": lambda: llama2("always"),
    "llama2_normalizer": lambda: llama2(None),
    "phi3": phi3,
    "embedded": embedded,
    "smollm2": smollm2,
}
