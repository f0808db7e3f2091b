r"""Reads a mathematical expression in normal spelling as a tree of `Node`s, its numbers as exact fractions.

Numbers are decimals, repeating decimals, mixed numbers and numbers in other bases. `values.py` computes with the tree.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NoReturn

from podium.reward.math_answers.spelling import FUNCTIONS
from podium.reward.math_answers.units import NUMBER_WORDS, is_unit

MAX_EXPONENT_DIGITS = 4
MAX_NESTING = 40
MAX_FACTORS = 60
MAX_DETERMINANT = 4
NUMBER = re.compile(
    r"(?P<mixed>[0-9]+ +[0-9]+ ?/ ?[0-9]+(?![0-9.]))"
    r"|(?P<base>[0-9][0-9A-Za-z]*)\s*_\s*(?:\{\s*⟪?\s*(?P<braced>[0-9]{1,2}|[a-z]+)\s*⟫?\s*\}|(?P<bare>[0-9]{1,2}))"
    r"|(?P<whole>[0-9]*)\.(?P<lead>[0-9]*)(?:\\(?:overline|bar)\s*\{\s*(?P<over>[0-9]+)\s*\}"
    r"|(?P<dots>(?:\\dot\s*\{?[0-9]\}?[0-9]*)+)|\((?P<round>[0-9]+)\)(?=\s*$))"
    r"|(?P<long>[0-9]*\.[0-9]+)\s*\.\.\."
    r"|(?P<plain>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE](?P<exponent>[+-]?[0-9]+)(?![0-9A-Za-z.]))?"
)
FRACTION_BEHIND = re.compile(r"\s*\\frac\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))")
BEGINS_NUMBER = re.compile(r"[0-9]|\.(?:[0-9]|\\|\()")
GREEK = re.compile(
    "(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|sigma|tau|upsilon|phi|chi|"
    "psi|omega|Gamma|Delta|Theta|Lambda|Xi|Pi|Sigma|Phi|Psi|Omega|ell|pi|infty)"
)
RUN = re.compile("[A-Za-z]+")
NAMES = {"pi", "theta", "alpha", "beta", "gamma", "lambda", "infty"}
MARKED = ("overline", "bar", "vec", "hat", "tilde", "angle", "triangle", "widehat")
"""Commands that make a name of what follows them."""
BRACKETS = {"(": (")", "group"), "[": ("]", "group"), "{": ("}", "group"), "⌊": ("⌋", "floor"), "⌈": ("⌉", "ceiling")}
END_OF_ARGUMENT = re.compile(r" ?\\?([A-Za-z]+)")


class Unreadable(ValueError):
    """The text is no expression."""


@dataclass(frozen=True)
class Node:
    """A part of an expression: the operation and its operands."""

    kind: str
    parts: tuple[Any, ...]


def number(value: Fraction | int, decimals: int | None = None) -> Node:
    """A number; `decimals` is the number of its decimal places if it is written in digits."""
    return Node("number", (Fraction(value), decimals))


def difference(left: Node, right: Node) -> Node:
    return Node("add", (left, Node("minus", (right,))))


def read_expression(text: str) -> Node:
    """The whole text as an expression; `Unreadable` if it is none."""
    node, end = read_beginning(text)
    return node if end == len(text) else fail(text[end:])


def read_expressions(texts: list[str] | tuple[str, ...]) -> list[Node] | None:
    """Every text as an expression; None if one of them is none."""
    try:
        return [read_expression(text) for text in texts]
    except Unreadable:
        return None


def read_beginning(text: str) -> tuple[Node, int]:
    """The expression that the text begins with, and where it ends."""
    parser = _Parser(text)
    try:
        node = parser.sum()
    except RecursionError as error:
        raise Unreadable(text[:40]) from error
    parser.skip()
    return node, parser.at


def fail(text: str) -> NoReturn:
    raise Unreadable(text[:40])


def _read_number(match: re.Match[str]) -> Node:
    """The number of a match of `NUMBER`."""
    if match["mixed"]:
        whole, top, bottom = map(int, re.findall("[0-9]+", match["mixed"]))
        return number(whole + Fraction(top, bottom)) if 0 < top < bottom else fail(match[0])
    if match["base"]:
        written = match["braced"] or match["bare"]
        base = int(written) if written.isdigit() else NUMBER_WORDS.get(written, 0)
        try:
            return number(int(match["base"], base)) if 2 <= base <= 36 else fail(match[0])
        except ValueError as error:
            raise Unreadable(match[0]) from error
    if match["lead"] is not None:
        period = match["over"] or match["round"] or re.sub("[^0-9]", "", match["dots"])
        return number(_repeating(match["whole"], match["lead"], period))
    if match["long"]:
        whole, _, digits = match["long"].partition(".")
        if again := re.fullmatch(r"([0-9]*?)([0-9]{1,6}?)\2{1,}", digits):
            return number(_repeating(whole, again[1], again[2]))
        return number(Fraction(f"{whole or 0}.{digits}"), len(digits))
    exponent, plain = match["exponent"] or "0", match["plain"]
    if len(exponent.strip("+-").lstrip("0")) > MAX_EXPONENT_DIGITS:
        fail(match[0])
    value = Fraction("0" + plain if plain.startswith(".") else plain) * Fraction(10) ** int(exponent)
    return number(value, max(0, len(plain.partition(".")[2]) - int(exponent)))


def _repeating(whole: str, lead: str, period: str) -> Fraction:
    """0.1666… from `0`, `1` and `6`."""
    fixed = Fraction(int((whole or "0") + lead), 10 ** len(lead))
    return fixed + Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(lead))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth, self.bars = text, 0, 0, 0

    # ---- the text

    def fail(self) -> NoReturn:
        fail(self.text[self.at :])

    def skip(self) -> str:
        """Skips white space; the next character."""
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        self.skip()
        match = re.compile(pattern).match(self.text, self.at)
        if match:
            self.at = match.end()
        return match

    def expect(self, pattern: str) -> re.Match[str]:
        return self.take(pattern) or self.fail()

    def inside(self, closing: str) -> Node:
        """An expression up to a closing bracket."""
        bars, self.bars = self.bars, closing == "|"
        node = self.sum()
        self.bars = bars
        self.expect(re.escape(closing))
        return node

    def argument(self) -> Node:
        """The argument of a command: a group, a command or a single character."""
        if self.take(r"\{"):
            return self.inside("}")
        if digit := self.take("[0-9]"):
            return number(int(digit[0]))
        return self.atom() or self.fail()

    # ---- sums and products

    def sum(self) -> Node:
        self.depth += 1
        if self.depth > MAX_NESTING:
            fail("nested too deeply")
        terms = [self.product()]
        while sign := self.take(r"[+-]"):
            term = self.product()
            terms.append(Node("minus", (term,)) if sign[0] == "-" else term)
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def product(self) -> Node:
        node = self.signed()
        for _ in range(MAX_FACTORS):
            if sign := self.take(r"(?:\\(?:cdot|times)(?![A-Za-z])|\*)|(/)"):
                node = Node("over" if sign[1] else "times", (node, self.signed()))
                continue
            start = self.at
            factor = None if self.skip() in "+-" else self.power()
            if factor is None:
                self.at = start
                return node
            if _is_plain(node) and factor.kind == "number":
                fail(self.text[start:])  # 1 2
            node = Node("times", (node, factor))  # it binds as a product with a sign does, from the left
        fail("too many factors")

    def signed(self) -> Node:
        if sign := self.take(r"[+-]"):
            node = self.signed()
            return Node("minus", (node,)) if sign[0] == "-" else node
        return self.power() or self.fail()

    def power(self) -> Node | None:
        """An atom with the exponents, factorials and degree signs after it."""
        node = self.atom()
        while node is not None and (mark := self.take("[\\^°%]|!(?!=)")):
            if mark[0] == "^":
                node = Node("power", (node, self.exponent()))
            elif mark[0] == "%":
                node = Node("over", (node, number(100)))
            else:
                node = Node("factorial" if mark[0] == "!" else "degrees", (node,))
        return node

    def exponent(self) -> Node:
        if match := self.take(r"([+-]?)\s*([0-9]+)"):
            return number(int(match[1] + match[2]))
        if self.take("-"):
            return Node("minus", (self.argument(),))
        return self.argument()

    # ---- atoms

    def atom(self) -> Node | None:
        """A number, a letter, a bracket or a command; None where none begins."""
        mark = self.skip()
        if BEGINS_NUMBER.match(self.text, self.at):
            return self.number()
        if mark in BRACKETS:
            self.at += 1
            closing, kind = BRACKETS[mark]
            return Node(kind, (self.inside(closing),))
        if mark == "|" and not self.bars:
            self.at += 1
            return Node("absolute", (self.inside("|"),))
        if mark == "\\":
            return self.command()
        return self.letters() if mark.isascii() and mark.isalpha() else None

    def number(self) -> Node:
        match = self.take(NUMBER) or self.fail()
        node = _read_number(match)
        if (match["plain"] or "").isdigit() and (part := FRACTION_BEHIND.match(self.text, self.at)):
            top, bottom = int(part[1] or part[2]), int(part[3] or part[4])
            if 0 < top < bottom:
                self.at = part.end()
                return number(node.parts[0] + Fraction(top, bottom))
        return node

    def letters(self) -> Node | None:
        """A function, a name, or one letter; None for a word, because a word is no product of letters."""
        match = RUN.match(self.text, self.at)
        run = match[0] if match else ""
        before = self.text[: self.at]
        if based := self.take(r"([A-F][0-9A-F]+)\s*_\s*\{?\s*16\s*\}?"):
            return number(int(based[1], 16))
        if run not in FUNCTIONS and (split := re.fullmatch(r"(sin|cos|tan|ln|log)[a-z]", run)):
            run = split[1]
        if run in FUNCTIONS:
            self.at += len(run)
            return self.function(run)
        if run not in NAMES:
            is_apart = re.search(r"[0-9A-Za-z)}|°%] +$", before)
            is_behind_number = re.search(r"[0-9})]\s*$", before)
            if (len(run) > 2 and is_apart) or (len(run) > 1 and is_behind_number and is_unit(run)):
                return None
            run = run if len(run) > 1 and run.isupper() else run[0]
        self.at += len(run)
        return self.named(run)

    def named(self, name: str) -> Node:
        """A symbol with its index and primes, or a function of a user's own."""
        if self.take(r"_"):
            index = self.expect(r"\{([^{}]*)\}|(\\?[A-Za-z]+(?![A-Za-z])|[A-Za-z0-9])")
            name += "_" + re.sub(r"[\s⟪⟫]", "", index[1] or index[2])
        if primes := self.take("'+"):
            name += primes[0]
        if re.fullmatch("[fghpqFGHPQTE]('*|_.*)", name) and (inner := self.take(r"\(([^()]*)\)")):
            if name[0] not in inner[1]:
                return Node("symbol", (f"{name}({inner[1].replace(' ', '')})",))
            self.at -= len(inner[0])
        return Node("symbol", (name,))

    # ---- commands and functions

    def command(self) -> Node | None:
        start = self.at
        match = self.take(r"\\([A-Za-z]+)")
        name = match[1] if match else ""
        if name in FUNCTIONS and name != "sqrt":
            return self.function(name)
        if GREEK.fullmatch(name):
            return self.named(name)
        if method := getattr(self, f"read_{name}", None):
            return method()
        if name in MARKED:
            inner = self.take(r"\{([^{}]*)\}|([A-Za-z]+)")
            return Node("symbol", (f"{name} {inner[0].strip('{} ')}",)) if inner else fail(name)
        self.at = start
        return None

    def read_frac(self, kind: str = "over") -> Node:
        top = self.argument()
        return Node(kind, (top, self.argument()))

    def read_binom(self) -> Node:
        return self.read_frac("binomial")

    def read_sqrt(self) -> Node:
        index = self.inside("]") if self.take(r"\[") else number(2)
        return Node("root", (self.argument(), index))

    def read_sum(self, kind: str = "sum") -> Node:
        variable = self.expect(r"_\s*\{\s*([A-Za-z])\s*=")[1]
        low = self.inside("}")
        self.expect(r"\^")
        high = self.exponent()
        return Node(kind, (variable, low, high, self.product()))

    def read_prod(self) -> Node:
        return self.read_sum("product")

    def read_int(self) -> Node:
        self.expect("_")
        low = self.exponent()
        self.expect(r"\^")
        high = self.exponent()
        end = re.compile(r"(\{\s*)?(?<![A-Za-z\\])d\s*([A-Za-z])(?![A-Za-z])(\s*\})?").search(self.text, self.at)
        if end is None:
            self.fail()
        if end[3]:  # \frac{dx}{x}
            self.text = self.text[: end.start()] + ("{1}" if end[1] else end[3]) + self.text[end.end() :]
            return Node("integral", (end[2], low, high, self.sum()))
        body, self.at = self.text[self.at : end.start()], end.end()
        return Node("integral", (end[2], low, high, read_expression(body.strip() or "1")))

    def read_begin(self) -> Node:
        """The determinant of a matrix."""
        match = self.take(r"\{([pbvB])matrix\}(.*?)\\end\s*\{\1matrix\}") or fail(self.text)
        if match[1] != "v" and not self.text[: match.start()].endswith(("\\det\\begin", "\\det \\begin")):
            fail(self.text)
        rows = [row.split("&") for row in re.split(r"\\\\", match[2]) if row.strip()]
        if len(rows) > MAX_DETERMINANT or any(len(row) != len(rows) for row in rows):
            fail(match[0])
        return Node("determinant", tuple(read_expression(cell.strip()) for row in rows for cell in row))

    def read_lim(self) -> Node:
        variable = self.expect(r"_\s*\{\s*([A-Za-z])\s*\\(?:to|rightarrow)(?![A-Za-z])")[1]
        goal = self.sum()
        side = self.take(r"\^\s*\{?\s*([+-])\s*\}?")
        self.expect(r"\}")
        return Node("limit", (variable, goal, side[1] if side else "", self.product()))

    def function(self, name: str) -> Node:
        """A function and its argument: a bracket, or the factors up to the next function or operator."""
        power = base = None
        while mark := self.take(r"[\^_]"):
            if mark[0] == "^":
                power = self.exponent()
            else:
                base = self.argument()
        if name in ("max", "min", "gcd", "lcm") and self.take(r"\(|⦃"):
            items = [self.sum()]
            while self.take(","):
                items.append(self.sum())
            self.expect(r"\)|⦄")
            return Node(name, tuple(items))
        if name == "det":
            return (self.command() if self.skip() == "\\" else None) or fail(self.text)
        if name == "sqrt":
            return Node("root", (self.function_argument(), number(2)))
        node = Node(name, (self.function_argument(), *([base] if base else [])))
        if power is not None and _is_minus_one(power) and name in ("sin", "cos", "tan", "cot"):
            return Node("arc" + name, node.parts)
        return node if power is None else Node("power", (node, power))

    def function_argument(self) -> Node:
        if self.skip() and self.skip() in "({":
            return self.atom() or self.fail()
        node = self.signed()
        while True:
            start = self.at
            if _has_pi(node) and self.take(r"/(?=\s*[0-9])"):
                node = Node("over", (node, self.number()))
                continue
            match = END_OF_ARGUMENT.match(self.text, self.at)
            if match and (match[1] in FUNCTIONS or match[1] in ("sum", "int", "lim", "cdot", "times")):
                return node
            factor = None if self.skip() in "+-/*(" else self.power()
            if factor is None or (_is_plain(node) and factor.kind == "number"):
                self.at = start
                return node
            node = Node("times", (node, factor))


def _is_minus_one(node: Node) -> bool:
    while node.kind == "group":
        node = node.parts[0]
    return node == number(-1) or (node.kind == "minus" and node.parts[0].parts[:1] == (1,))


def _has_pi(node: Node) -> bool:
    """Whether the expression is a multiple of pi."""
    return node == Node("symbol", ("pi",)) or (node.kind == "times" and any(map(_has_pi, node.parts)))


def _is_plain(node: Node) -> bool:
    """Whether the expression ends in a bare number, after which no other number may follow."""
    return node.kind == "number" or (node.kind == "times" and _is_plain(node.parts[-1]))
