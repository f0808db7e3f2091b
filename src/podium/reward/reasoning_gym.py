"""Reward by the own scorer of a row's `reasoning-gym` task, between 0 and 1.

The answer is the text between the last <answer> and </answer>; without them the task is scored as unanswered. Some
scorers evaluate the answer as Python. They get to see only what is an expression of numbers, names, texts, lists
and well-known functions, so that no policy can run code by writing it; anything else counts as unanswered. So does what
a scorer would pay for though it is wrong (`_gym_answers.py`), and what takes a scorer more than 512 MB.
"""

import ast
import copy
import inspect
import io
import json
import keyword
import textwrap
import tokenize
import warnings
from functools import lru_cache
from typing import Any

from podium.records import Prompt, Rollout
from podium.reward._contract import declare_range, gold_answer
from podium.reward._gym_answers import is_acceptable, little_memory
from podium.reward._thinking import judges_answer

EVALUATING = {"eval", "exec", "parse_expr", "sympify"}
"""Functions that run the text that they are given; sympy's do."""

OPERATORS = {"+", "-", "*", "/", "//", "**", "%", "^", ",", "(", "["}
"""What may stand before an opening parenthesis that calls nothing."""

CLOSING = {")", "]"}
FUNCTIONS = {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"}
INVISIBLE = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@gold_answer(lambda prompt: f"<answer>{prompt.metadata['entry']['answer']}</answer>")
@declare_range(0.0, 1.0)
@judges_answer
def reasoning_gym(prompt: Prompt, rollout: Rollout) -> float:
    """Partial credit is the task's business."""
    if "entry" not in prompt.metadata:
        raise ValueError("the row does not come from the data source reasoning_gym")
    from reasoning_gym.utils import extract_answer

    task, options, entry = (prompt.metadata[key] for key in ("task", "options", "entry"))
    answer = extract_answer(rollout.text)
    if answer is not None and not (is_acceptable(task, answer, entry) and _is_safe(task, answer)):
        answer = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files left open, of numbers that cannot be parsed
        return _score(_scorer(task, json.dumps(options, sort_keys=True)), answer, entry)


def _score(scorer: Any, answer: str | None, entry: dict[str, Any]) -> float:
    """Scorers may change the entry. Some raise on a text that they cannot read, or run out of memory; where they can
    score the same entry unanswered, the text is at fault and is worth as much."""
    try:
        with little_memory():
            return float(scorer.score_answer(answer, copy.deepcopy(entry)))
    except Exception:
        return float(scorer.score_answer(None, copy.deepcopy(entry)))


def _is_safe(task: str, answer: str) -> bool:
    return not _evaluates(task) or is_plain_expression(answer)


@lru_cache(maxsize=64)
def _scorer(task: str, options: str) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(task, **json.loads(options))


@lru_cache(maxsize=256)
def _evaluates(task: str) -> bool:
    """Whether the task's scorer hands the answer to a function that runs it."""
    from reasoning_gym.factory import DATASETS

    source = textwrap.dedent(inspect.getsource(DATASETS[task][0].score_answer))
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return any(ast.unparse(call.func).rpartition(".")[2] in EVALUATING for call in calls)


def is_plain_expression(text: str) -> bool:
    """Whether evaluating the text can do nothing but arithmetic: every call is of a function that is known."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    before: str | None = None
    for token in tokens:
        if token.type in INVISIBLE:
            continue
        calls_nothing = before is None or before in OPERATORS or before in FUNCTIONS
        if not _is_plain(token) or (token.string == "(" and not calls_nothing):
            return False
        before = token.string
    return True


def _is_plain(token: tokenize.TokenInfo) -> bool:
    if token.type == tokenize.NAME:
        return "__" not in token.string and not keyword.iskeyword(token.string)
    if token.type == tokenize.STRING:
        return token.string[0] in "'\""  # no prefix: an f-string may hold code
    return token.type == tokenize.NUMBER or token.string in OPERATORS | CLOSING
