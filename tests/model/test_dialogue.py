"""Bridges between turns, for the chat templates of several families: the rendered chat goes on, as text and as ids."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from podium.errors import InputError
from podium.model.chat import render
from podium.model.dialogue import Dialogue
from podium.model.load import EMBEDDED

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN = """{% if tools %}<|im_start|>system
You have tools:{% for t in tools %} {{ t.function.name }}{% endfor %} Write <tool_call>.<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content.split('</think>')[-1].lstrip() if m.role == 'assistant' else m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA = """{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}\
<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}\
{% if m.role not in ('user', 'assistant') %}{{ raise_exception('role') }}{% endif %}\
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
HARMONY = """{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}\
{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
R1 = """{{ bos_token }}{% for m in messages %}{{ '<User>' if m.role == 'user' else '<Bot>' }}{{ m.content }}\
{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<Bot><think>
{% endif %}"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>"]
SPECIAL += ["<end_of_turn>", "<|start|>", "<|message|>", "<|end|>", "<|return|>", "<User>", "<Bot>"]
PLAIN = AutoTokenizer.from_pretrained(EMBEDDED)
FAMILIES = {"chatml": CHATML, "qwen": QWEN, "llama": LLAMA, "gemma": GEMMA, "harmony": HARMONY}
FAMILIES |= {"embedded": PLAIN.chat_template}
ENDS = {"chatml": "<|im_end|>", "qwen": "<|im_end|>", "llama": "<|eot_id|>", "gemma": "<end_of_turn>"}
ENDS |= {"harmony": "<|end|>", "embedded": "</s>"}


def tokenizer_of(template: str) -> Any:
    made = copy.deepcopy(PLAIN)
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.chat_template = template
    return made


TOKENIZERS = {family: tokenizer_of(template) for family, template in FAMILIES.items()}
DIALOGUES = {family: Dialogue(tokenizer) for family, tokenizer in TOKENIZERS.items()}
TEXTS = st.text("abcdefgh 0123456789+=.\n", min_size=1, max_size=30).map(str.strip).filter(bool)


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(turns=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), question=TEXTS)
def test_a_conversation_has_the_ids_of_the_rendered_chat(family: str, turns: Any, question: str) -> None:
    """Prompt, answers and bridges one after the other are the whole chat as the template renders it."""
    tokenizer, dialogue = TOKENIZERS[family], DIALOGUES[family]
    end = tokenizer.convert_tokens_to_ids(ENDS[family])
    messages = [{"role": "user", "content": question}]
    ids = render(tokenizer, messages)
    own = "<|message|>" if family == "harmony" else ""  # which the policy writes there
    for answer, reply in turns:
        sampled = (*ids_of(tokenizer, own + answer), end)
        message = {"role": "user", "content": reply}
        ids += sampled + dialogue.bridge([message], sampled[-1])
        messages += [{"role": "assistant", "content": answer}, message]
    assert ids == render(tokenizer, messages)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_that_was_cut_is_ended_by_the_bridge(family: str) -> None:
    tokenizer, dialogue = TOKENIZERS[family], DIALOGUES[family]
    message = {"role": "user", "content": "go on"}
    end = tokenizer.convert_tokens_to_ids(ENDS[family])
    assert dialogue.bridge([message], last_id=5) == (end, *dialogue.bridge([message], last_id=end))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_ends_a_turn_is_text_in_a_message(family: str) -> None:
    tokenizer, dialogue = TOKENIZERS[family], DIALOGUES[family]
    end = tokenizer.convert_tokens_to_ids(ENDS[family])
    with_end = dialogue.bridge([{"role": "user", "content": f"a{ENDS[family]}b"}], None)
    without = dialogue.bridge([{"role": "user", "content": "ab"}], None)
    assert with_end.count(end) == without.count(end)
    assert len(with_end) == len(without) + len(ids_of(PLAIN, ENDS[family].replace("</s>", "x" * 4)))


def test_results_of_tools_take_the_role_that_the_template_knows() -> None:
    assert {family: dialogue.tool_role for family, dialogue in DIALOGUES.items()} == {
        "chatml": "tool",
        "qwen": "tool",
        "llama": "tool",
        "gemma": "user",
        "harmony": "tool",
        "embedded": "tool",
    }
    text = TOKENIZERS["qwen"].decode(DIALOGUES["qwen"].bridge([{"role": "tool", "content": "4"}], None))
    assert "<tool_response>\n4\n</tool_response><|im_end|>" in text.replace("<unk>", "")


def test_thinking_that_the_template_would_drop_stays() -> None:
    """The bridge does not depend on what the policy wrote, so a turn with thinking is continued as it is."""
    tokenizer, dialogue = TOKENIZERS["qwen"], DIALOGUES["qwen"]
    prompt = render(tokenizer, [{"role": "user", "content": "a"}])
    wrote = (*ids_of(tokenizer, "<think>b</think>c"), tokenizer.convert_tokens_to_ids("<|im_end|>"))
    whole = prompt + wrote + dialogue.bridge([{"role": "user", "content": "d"}], wrote[-1])
    assert "<think>b</think>c<|im_end|>\n<|im_start|>user\nd<|im_end|>" in tokenizer.decode(whole)


def test_a_bridge_may_open_the_thinking_of_the_next_turn() -> None:
    dialogue = Dialogue(tokenizer_of(R1))
    assert (
        tokenizer_of(R1).decode(dialogue.bridge([{"role": "user", "content": "a"}], None))
        == "</s><User>a<Bot><think>\n"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}{% for m in messages %}{{ m.content }}</s>{% endfor %}",
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}</s>{% endif %}{% endfor %}",
        "{{ messages[-1].content }}</s>",
        "{% for m in messages | reverse %}{{ m.content }}</s>{% endfor %}",
    ],
)
def test_a_template_that_rewrites_what_came_before_is_refused(template: str) -> None:
    with pytest.raises(InputError, match="cannot continue a conversation"):
        Dialogue(tokenizer_of(template))
