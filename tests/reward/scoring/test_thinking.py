"""Thinking never counts, in any verifier: the same texts for all of them, with the right answer at other places."""

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from podium.check.verdicts import _reward_notes
from podium.model.chat import STYLES, decode_answer, opens_thinking
from podium.settings.lookup import choices, find, option_fields
from tests.builders import make_group, make_prompt, make_rollout

PROGRAM = "```python\ndef add(a, b):\n    return a {} b\n```"
STDIO = "```python\nprint({})\n```"
ENTRY = {"question": "1 + 2", "answer": "3", "metadata": {}}
GYM = {"task": "basic_arithmetic", "options": {}, "entry": ENTRY}
WEAK = {"sandbox": "weak"}

CASES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "arithmetic": ({"answer": 18}, "#### 18", "#### 17", {}),
    "arithmetic_lax": ({"answer": 18}, "So 18.", "So 17.", {}),
    "gsm8k": ({"answer": "18"}, "So 18.", "So 17.", {}),
    "math": ({"answer": "18"}, r"\boxed{18}", r"\boxed{17}", {}),
    "strict_math": ({"answer": "18"}, r"\boxed{18}", r"\boxed{17}", {}),
    "answer_tag": ({"answer": 18}, "<answer>18</answer>", "<answer>17</answer>", {}),
    "exact": ({"answer": "Paris"}, "Paris", "Rome", {}),
    "string_f1": ({"answer": "Paris"}, "Paris", "Rome", {}),
    "puzzle": ({"answer": "Paris"}, "<answer>Paris</answer>", "Rome", {}),
    "flan": ({"answer": "Paris"}, "The answer is: Paris", "The answer is: Rome", {}),
    "search": ({"answer": "Paris"}, "<answer>Paris</answer>", "<answer>Rome</answer>", {}),
    "search_f1": ({"answer": "Paris"}, "<finish>Paris</finish>", "<finish>Rome</finish>", {}),
    "ifeval": ({"answer": {"func_name": "validate_lowercase"}}, "yes", "NO", {}),
    "code": ({"answer": ["assert add(1, 2) == 3"]}, PROGRAM.format("+"), PROGRAM.format("-"), WEAK),
    "code_stdio": ({"answer": [{"input": "", "output": "18"}]}, STDIO.format(18), STDIO.format(17), WEAK),
    "reasoning_gym": ({"metadata": GYM}, "<answer>3</answer>", "<answer>4</answer>", {}),
}
"""Verifier → what its row has, a right text, a wrong one, options."""

ELSEWHERE = {"judge", "rubric"}
"""They ask a model; see `test_judge.py`."""
NOT_ANSWERS = {"length", "max_length", "overlong", "think_format", "r1_format", "environment"}
"""They score the length or the form, of which thinking is a part, or what happened in an environment."""


def score(name: str, text: str, *, opens: bool = False, **options: Any) -> float:
    row, _, _, own = CASES[name]
    prompt = make_prompt(**row, opens_thinking=opens)
    return find("reward", name)(prompt, make_rollout(text), **own, **options)


def test_every_reward_is_of_one_kind_or_the_other() -> None:
    judged = {name for name in choices("reward") if "thinking" in option_fields(find("reward", name))}
    assert judged == set(CASES) | ELSEWHERE
    assert judged | NOT_ANSWERS == set(choices("reward"))


@pytest.mark.parametrize("name", CASES)
def test_only_what_follows_the_thinking_is_judged(name: str) -> None:
    _, right, wrong, _ = CASES[name]
    best = score(name, right)
    assert best >= 1
    assert score(name, f"<think>{wrong}</think>{right}") == best
    assert score(name, f"<think>{right}</think>{wrong}") < 0.5
    assert score(name, f"<think>{right}</think>") < 0.5
    assert score(name, f"<think>a</think>{wrong}<think>b</think>\n\n{right}") == best


@pytest.mark.parametrize("name", CASES)
def test_a_text_cut_inside_its_thinking_has_no_answer(name: str) -> None:
    _, right, wrong, _ = CASES[name]
    assert score(name, f"<think>{right}") == 0
    assert score(name, f"<think>{wrong}</think>\n<think>{right}") == 0
    assert score(name, f" \n<think>{right}") == 0


@pytest.mark.parametrize(("opening", "closing"), STYLES.items())
@pytest.mark.parametrize("name", CASES)
def test_every_style_of_tags_is_thinking(name: str, opening: str, closing: str) -> None:
    _, right, wrong, _ = CASES[name]
    assert score(name, f"{opening}\n{wrong}{closing}{right}") >= 1
    assert score(name, f"{opening}{right}{closing}{wrong}") < 0.5
    assert score(name, f"{opening}\n{right}") == 0
    assert score(name, f"<think>{wrong}</think>{opening}{right}") == 0
    assert score(name, f"{wrong}{closing}{right}", opens=True) >= 1


def test_a_tag_that_an_answer_mentions_opens_nothing() -> None:
    assert score("math", r"The answer is $\boxed{18}$. I used <think> tags.") == 1
    assert score("math", r"<think>so</think>\boxed{18}, without a <think> or a </reasoning>") == 1
    assert score("code", PROGRAM.format("+") + "\nIt never writes [THINK].") == 1
    program = "```python\ndef add(a, b):\n    return a + b if '<think>' else 0\n```"
    assert score("code", program) == 1


def test_only_the_tag_of_the_thinking_closes_it() -> None:
    assert score("math", r"<think>\boxed{18}</thinking>") == 0
    assert score("math", r"<think>I could write </reasoning>.</think>\boxed{18}") == 1
    assert score("math", r"<think>a</think><reasoning>b</reasoning>\boxed{18}") == 1
    assert score("math", r"<reasoning>b</reasoning></think>\boxed{18}", opens=True) == 1
    harmony = "<|channel|>analysis<|message|>{}assistant<|channel|>commentary<|message|>{}assistant<|channel|>final"
    assert score("math", (harmony + r"<|message|>\boxed{{17}}").format(r"\boxed{18}", r"\boxed{18}")) == 0
    assert score("math", harmony.format(r"\boxed{18}", r"\boxed{18}")) == 0


@pytest.mark.parametrize("name", CASES)
def test_a_prompt_that_ends_in_the_tag_begins_the_thinking(name: str) -> None:
    _, right, wrong, _ = CASES[name]
    assert score(name, right, opens=True) == 0
    assert score(name, f"{wrong}</think>{right}", opens=True) >= 1
    assert score(name, f"{right}</think>{wrong}", opens=True) < 0.5
    assert score(name, f"{right}</think>{wrong}") < 0.5  # a template that the prompt does not know of


@pytest.mark.parametrize("name", [name for name in CASES if name not in {"exact", "puzzle", "string_f1", "ifeval"}])
def test_thinking_counts_where_the_option_says_so(name: str) -> None:
    _, right, _, _ = CASES[name]
    assert score(name, f"<think>\n{right}", thinking="count") >= 1
    assert score(name, right, opens=True, thinking="count") >= 1


def test_thinking_that_counts_is_judged_with_its_tags() -> None:
    assert score("exact", "<think></think>Paris", thinking="count") == 0  # "thinkthinkparis"
    assert score("ifeval", "<think>NO</think>yes", thinking="count") == 0
    assert score("string_f1", "<think>so </think> Paris", thinking="count") == 2 / 4
    assert score("puzzle", "<think>so</think> Paris", thinking="count") == 0


def test_the_check_says_how_many_answers_end_inside_their_thinking() -> None:
    texts = ("<think>so", "<think>so</think>3", "3")
    group = make_group((0.0, 1.2, 1.2), rollouts=tuple(make_rollout(text) for text in texts))
    opened = replace(group, prompt=make_prompt(opens_thinking=True))
    assert [note[:45] for note in _reward_notes([group])] == ["1 of 3 answers end inside their thinking, so "]
    assert any(note.startswith("3 of 6 answers end inside") for note in _reward_notes([group, opened]))
    assert not any("thinking" in note for note in _reward_notes([make_group()]))


class Pieces:
    """A tokenizer whose tokens are given."""

    def __init__(self, *tokens: str, special: tuple[str, ...] = ()) -> None:
        self._tokens, self.all_special_tokens = list(tokens), list(special)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [self._tokens.index(token) for token in tokens]

    def decode(self, ids: Any, *, skip_special_tokens: bool) -> str:
        tokens = [self._tokens[i] for i in ids]
        return "".join(t for t in tokens if not (skip_special_tokens and t in self.all_special_tokens))


@pytest.mark.parametrize(
    ("tokens", "opens"),
    [
        (["Q", "<think>"], True),
        (["Q", "<think>", "\n"], True),
        (["Q", *"<think>\n"], True),
        (["Q", "<think>", "</think>", "\n\n"], False),
        (["Q", "<think>", "so"], False),
        (["Q", "[THINK]"], True),
        (["Q", "<|channel>", "thought", "\n"], True),
        (["Q", "<|channel>", "thought", "\n", "<channel|>"], False),
        (["Q", "<|channel|>", "analysis", "<|message|>"], True),
        (["Q"], False),
    ],
)
def test_whether_a_prompt_opens_the_thinking(tokens: list[str], opens: bool) -> None:
    assert opens_thinking(Pieces(*tokens), range(len(tokens))) is opens
    assert opens_thinking(Pieces(*tokens, special=("<think>", "</think>")), range(len(tokens))) is opens


def test_special_tags_stay_in_the_text_of_an_answer() -> None:
    tokens = ("<think>", "a", "</think>", "b", "<end>")
    plain = Pieces(*tokens, special=("<end>",))
    special = Pieces(*tokens, special=("<think>", "</think>", "<end>"))
    assert decode_answer(plain, range(5)) == decode_answer(special, range(5)) == "<think>a</think>b"
    assert decode_answer(special, (0, 0, 1)) == "<think><think>a"
    assert decode_answer(special, ()) == ""


def test_special_tokens_that_are_a_part_of_a_tag_stay() -> None:
    harmony = ("<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|channel|>", "final", "<|message|>", "b")
    tokenizer = Pieces(*harmony, special=("<|channel|>", "<|message|>", "<|end|>"))
    ids = [harmony.index(token) for token in harmony]
    text = "<|channel|>analysis<|message|>a<|channel|>final<|message|>b"
    assert decode_answer(tokenizer, ids) == text


def test_a_special_token_that_the_tokenizer_does_not_list_stays_too() -> None:
    made = Tokenizer(WordLevel({"so": 0, "18": 1, "?": 2}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    made.add_special_tokens(["[THINK]", "[/THINK]", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    ids = tokenizer.encode("[THINK]so[/THINK]18</s>")
    assert "[THINK]" not in tokenizer.all_special_tokens
    assert tokenizer.decode(ids, skip_special_tokens=True) == "so 18"
    assert decode_answer(tokenizer, ids) == "[THINK]so[/THINK]18"
