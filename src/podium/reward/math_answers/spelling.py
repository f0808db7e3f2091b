r"""One spelling for each sign of a mathematical answer, so that one parser can read LaTeX, Unicode and plain text.

`\dfrac12\,\text{cm}` becomes `\frac12 ⟪cm⟫`: layout is removed, words marked as text are in `⟪…⟫`, the braces of a set
are `⦃…⦄`, digits in groups of three are joined, and a currency is `¤` with its code.
"""

import re
from itertools import pairwise

from podium.reward.scoring.verifiers import WIDE

SIGNS = str.maketrans(
    {
        "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
        "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
        "≠": r"\ne ", "≡": r"\equiv ", "≈": r"\approx ", "±": r"\pm ", "∓": r"\mp ", "∪": r"\cup ", "∩": r"\cap ",
        "∅": r"\emptyset ", "∈": r"\in ",
        "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "λ": r"\lambda ", "μ": r"\mu ",
        "θ": r"\theta ", "φ": r"\varphi ", "ω": r"\omega ", "ℓ": r"\ell ", "√": r"\sqrt ",
        "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "⅕": r"\frac{1}{5}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
        "…": "...", "’": "'", "‘": "'", "“": '"', "”": '"', "〈": "⟨", "〉": "⟩", "\u200b": "", "\0": " ",
        "€": "¤EUR ", "£": "¤GBP ", "¥": "¤JPY ", "₹": "¤INR ", "¢": "⟪cents⟫",
        "⟪": " ", "⟫": " ", "⦃": " ", "⦄": " ", "¤": " ",
        **dict.fromkeys("\u00a0\u202f\u2009\u2007\u2002\u2003\u2005\u2006\u2008\u200a\t\r\n", " "),
    }
)  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "0123456789-n")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")

GAP = r"(?<!\\)\\(?:[,;:! ]|(?:thinspace|quad|qquad)(?![A-Za-z]))|~"
THOUSANDS_MARK = rf"(?:\{{,\}}|,\\!|,\s*\\!|{GAP}| |')"
GROUPED = re.compile(rf"(?<![0-9.,])[0-9]{{1,3}}(?:{THOUSANDS_MARK}[0-9]{{3}})+(?![0-9])")

COMMANDS = {  # in one spelling: all names of the command
    "": "displaystyle textstyle limits nolimits large Large boldmath rm bf it boldsymbol bm mathbf mathit mathcal "
        "mathsf mathnormal ensuremath",
    " ": "checkmark square blacksquare quad qquad enspace noindent",
    r"\frac": "dfrac tfrac cfrac xfrac", r"\binom": "dbinom tbinom", r"\emptyset ": "varnothing O",
    r"\le ": "le leq leqq leqslant", r"\ge ": "ge geq geqq geqslant", r"\ne ": "ne neq neqq neqslant",
    "<": "lt", ">": "gt", "|": "lvert rvert mid vert", "/": "div", "*": "ast star", ":": "colon ratio", "° ": "degree",
    "⌊": "lfloor", "⌋": "rfloor", "⌈": "lceil", "⌉": "rceil", "⟨": "langle", "⟩": "rangle",
    "⦃": "lbrace", "⦄": "rbrace", "...": "ldots dots cdots", " or ": "lor vee", " and ": "land wedge",
    "ℝ ": "R", "ℤ ": "Z", "ℕ ": "N",
}  # fmt: skip
SPELLINGS = {name: spelling for spelling, names in COMMANDS.items() for name in names.split()}
REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\$", "¤USD "),
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:tag|label|phantom|hspace|vspace)\*?\s*\{[^{}]*\}|✓|✅", " "),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\mathbb\s*\{?([RZNQC])\}?", lambda match: "ℝℤℕℚℂ"["RZNQC".index(match[1])] + " "),
        (r"\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|°|º", "° "),
        (r"\\([A-Za-z]+)", lambda match: SPELLINGS.get(match[1], match[0])),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\}])C_(?:\{([0-9]+)\}|([0-9]))\^(?:\{([0-9]+)\}|([0-9]))", r"\\binom{\1\2}{\3\4}"),
        (r"<=|=<", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\ne "),
        (r"\\\{", "⦃"),
        (r"\\\}", "⦄"),
        (r"\{:\}", ":"),
        (r"\\%|％", "%"),
        (r"(?<=[0-9A-Za-z)}])\*\*(?=[0-9A-Za-z({-])", "^"),
        (r"\*\*|__", " "),
        (r"[⁰¹²³⁴-⁹⁻ⁿ]+", lambda m: "^{" + m[0].translate(SUPERSCRIPTS) + "}"),
        (r"[₀-₉]+", lambda m: "_{" + m[0].translate(SUBSCRIPTS) + "}"),
        (r"\\sqrt\s*(?=\()", "sqrt"),
        (r"\\sqrt\s*([0-9]+)", r"\\sqrt{\1}"),
        (r"\\\\\s*\[[^\]]*\]", r"\\\\ "),  # the height of a line in a matrix
    ]
]
TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textup|textnormal|mathrm|mbox|hbox|operatorname\*?|emph|underline)"
    r"\s*\{((?:[^{}⟪⟫]|\{[^{}⟪⟫]*\})*)\}"
)
FUNCTIONS = [
    "arcsin", "arccos", "arctan", "arccot", "sinh", "cosh", "tanh", "coth", "sin", "cos", "tan", "cot", "sec", "csc",
    "log", "ln", "lg", "exp", "sqrt", "max", "min", "gcd", "lcm", "det", "cis",
]  # fmt: skip
CONNECTIVES = re.compile(r"⟪\s*(,?)\s*(and|or|to|if|for|when|where|mod)\s*(,?)\s*⟫")
COMMAND = re.compile(r"\\[A-Za-z]+|⟪[^⟪⟫]*⟫")
PARAMETER = re.compile(r"[,;(] ?(?:where |for |with )?([a-z]) ?\\in ?(?:ℤ|Z) ?\)?$")
BARE_GROUPS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")


def normal(answer: str) -> str:
    """The answer in one spelling, without surrounding punctuation."""
    text = answer.translate(WIDE).translate(SIGNS)
    text = GROUPED.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    for pattern, replacement in REWRITES:
        text = pattern.sub(replacement, text)
    text = re.sub(GAP, lambda match: "" if match[0] == r"\!" else " ", text)
    text = _without_delimiters(text)
    for _ in range(4):
        if text == (text := TEXT.sub(_as_text, text)):
            break
    text = CONNECTIVES.sub(r"\1 \2 \3", text)
    return _without_parameter(trimmed(text))


def _without_parameter(text: str) -> str:
    r"""Without `, k \in ℤ` at the end if k occurs before it: answers that do not mention ℤ mean integers too."""
    match = PARAMETER.search(text)
    if match is None or (match[0][0] == "(") != match[0].endswith(")"):
        return text
    before = trimmed(text[: match.start()])
    if re.search(r"[<>]|\\(?:le|ge|ne|in)(?![A-Za-z])", before):
        return text  # the integers of a region
    return before if re.search(rf"(?<![A-Za-z\\]){match[1]}(?![A-Za-z])", COMMAND.sub(" ", before)) else text


def _without_delimiters(text: str) -> str:
    r"""Without `$…$` and `\(…\)`; a dollar that opens no formula is money."""
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    if text.count("$") % 2:
        text = re.sub(r"\$(?=\s*-?\s*[0-9.])", "¤USD ", text, count=1)
    return text.replace("$", " ")


def _as_text(match: re.Match[str]) -> str:
    """Words as text; anything else as a formula."""
    inside = match[1].strip()
    if inside in FUNCTIONS and (match[0].startswith("\\operatorname") or inside not in ("min", "sec")):
        return f"\\{inside} "
    if not re.search("[A-Za-z]", inside) or (match[0].startswith("\\mathrm") and inside in ("d", "e", "i")):
        return f" {inside} "
    return f"⟪{inside}⟫"


def trimmed(text: str) -> str:
    """Without surrounding punctuation; the dots of an endless decimal stay."""
    text = re.sub(r"\s+", " ", text).lstrip(" ;:=*,")
    endless = re.fullmatch(r"(.*[0-9]\.\.\.)[ .;:=*,]*", text)
    return endless[1] if endless else text.rstrip(" .;:=*,")


def squeezed(text: str) -> str:
    """For comparison as text: white space only between digits, no marks of text, no needless braces."""
    text = re.sub("[⟪⟫]", " ", text).strip()
    text = re.sub(r"(?<![0-9])\s|\s(?![0-9])", "", text)
    return re.sub(r"([\^_])\{([0-9A-Za-z])\}", r"\1\2", text)


def with_joined_groups(text: str) -> str:
    """1,234 as 1234, except in brackets, where commas separate items."""
    for match in reversed(_outside(text, BARE_GROUPS, "([⦃⟨", ")]⦄⟩")):
        text = text[: match.start()] + match[0].replace(",", "") + text[match.end() :]
    return text


ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{[A-Za-z]+\*?\}")


def split_at(text: str, separators: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts between the separators outside of brackets, and these separators."""
    places = [*_outside(text, separators)]
    ends = [0, *(place for match in places for place in match.span()), len(text)]
    parts = [text[start:end].strip() for start, end in [*pairwise(ends)][::2]]
    return parts, [match[0].strip() for match in places]


def _outside(
    text: str, separators: re.Pattern[str], opening: str = "([{⦃⟨⌊⌈", closing: str = ")]}⦄⟩⌋⌉"
) -> list[re.Match[str]]:
    """The separators outside of brackets."""
    depths, depth, at = [0] * (len(text) + 1), 0, 0
    while at < len(text):
        mark = text[at]
        width = 1
        if match := ENVIRONMENT.match(text, at):
            depth += 1 if match[1] == "begin" else -1
            width = len(match[0])
        elif mark == "\\":
            width = 2
        elif mark in opening:
            depth += 1
        elif mark in closing:
            depth -= 1
        for place in range(at, min(at + width, len(text))):
            depths[place] = max(depth, 1) if mark in closing or width > 2 else depth
        at += width
    return [match for match in separators.finditer(text) if depths[match.start()] == 0]
