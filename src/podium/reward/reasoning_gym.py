"""The score of a `reasoning-gym` task's own scorer, between 0 and 1.

The answer is the text between the last <answer> and </answer>; without them the task is scored as unanswered. Some
scorers evaluate the answer as Python. They only get expressions of numbers, names, texts, lists and well-known
functions, so that no policy can run code; anything else counts as unanswered. So does an answer that takes a scorer
more than 512 MB, or a wrong one that a scorer rewards. Every task was tried with constant answers, and three rewarded
them on all rows: `puzzle24` any four numbers that make 24, `coin_flip` the first digit of a probability, and
`complex_arithmetic` NaN.
"""

import ast
import cmath
import copy
import inspect
import io
import json
import keyword
import re
import textwrap
import tokenize
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Any

from podium.records import Prompt, Rollout
from podium.reward.math_answers.expressions import read_expressions
from podium.reward.math_answers.values import number_of
from podium.reward.scoring.verifiers import declare_range, gold_answer, judges_answer

EVALUATING = {"eval", "exec", "parse_expr", "sympify"}
"""Functions that run the text that they are given, as those of sympy do."""
OPERATORS = {"+", "-", "*", "/", "//", "**", "%", "^", ",", "(", "["}
"""Tokens before an opening parenthesis that is no call."""
CLOSING = {")", "]"}
FUNCTIONS = {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"}
INVISIBLE = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
MEMORY_MB = 512
"""Memory that scoring one answer may take in addition to what the process has."""
PUZZLE = re.compile(r"[0-9+*/()\s-]{0,200}")
NO_OPERATION = re.compile(r"[0-9)]\s*\(|\)\s*[0-9]|[0-9]\s+[0-9]|(?<![0-9])0[0-9]")
"""Numbers next to each other, which a reader of mathematics multiplies or joins."""
PROBABILITY = re.compile(r"[+-]?[0-9]{0,9}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?|[0-9]{1,40}/[0-9]{1,40}")


@gold_answer(lambda prompt: f"<answer>{prompt.metadata['entry']['answer']}</answer>")
@declare_range(0.0, 1.0)
@judges_answer
def reasoning_gym(prompt: Prompt, rollout: Rollout) -> float:
    """0 … 1; the task decides about partial credit."""
    if "entry" not in prompt.metadata:
        raise ValueError("the row does not come from the data source reasoning_gym")
    from reasoning_gym.utils import extract_answer

    task, options, entry = (prompt.metadata[key] for key in ("task", "options", "entry"))
    answer = extract_answer(rollout.text)
    is_safe = answer is None or not _evaluates(task) or is_plain_expression(answer)
    if answer is not None and not (is_acceptable(task, answer, entry) and is_safe):
        answer = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of files left open, of numbers that cannot be parsed
        return _score(_scorer(task, json.dumps(options, sort_keys=True)), answer, entry)


def _score(scorer: Any, answer: str | None, entry: dict[str, Any]) -> float:
    """The scorer's value. Scorers may change the entry, so they get a copy. Some raise on a text that they cannot read,
    or run out of memory; then the answer is worth as much as none."""
    try:
        with little_memory():
            return float(scorer.score_answer(answer, copy.deepcopy(entry)))
    except Exception:
        return float(scorer.score_answer(None, copy.deepcopy(entry)))


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
    """Whether evaluating the text only does arithmetic: every call is of a known function."""
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


def is_acceptable(task: str, answer: str, entry: dict[str, Any]) -> bool:
    """Whether the answer may go to the task's scorer; any other answer counts as unanswered."""
    try:
        is_nan = cmath.isnan(complex(re.sub(r"\s", "", answer).lower().replace("nani", "nanj")))
    except ValueError:
        is_nan = False
    return not is_nan and DEMANDS.get(task, lambda *_: True)(answer, entry)


@contextmanager
def little_memory() -> Iterator[None]:
    """Raises `MemoryError` if scoring takes too much: some scorers expand what an answer only names, as U999999999."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limits = [limit for limit in (soft, hard, used + (MEMORY_MB << 20)) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _makes_24(answer: str, entry: dict[str, Any]) -> bool:
    """Whether the answer uses the row's numbers, each once, and makes exactly 24 with + - * / and brackets."""
    if not PUZZLE.fullmatch(answer) or NO_OPERATION.search(answer):
        return False
    used = sorted(int(number) for number in re.findall(r"[0-9]+", answer))
    nodes = read_expressions([answer.strip()])
    return nodes is not None and used == sorted(entry["metadata"]["numbers"]) and number_of(nodes[0]) == 24


def _is_near(answer: str, entry: dict[str, Any]) -> bool:
    """Whether the answer is the probability to four places; the scorer would also reward its first digit alone."""
    written = answer.replace(",", "").strip()
    if not PROBABILITY.fullmatch(written):  # also texts that take long to compute, such as 1e9999999
        return False
    try:
        return abs(float(Fraction(written)) - float(Fraction(entry["answer"]))) <= 1e-4
    except (ValueError, ZeroDivisionError, OverflowError):
        return False


DEMANDS: dict[str, Callable[[str, dict[str, Any]], bool]] = {"puzzle24": _makes_24, "coin_flip": _is_near}
