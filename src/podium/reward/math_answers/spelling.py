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

WORD = r"(?![A-Za-z])"
GAP = r"(?<!\\)\\(?:[,;:! ]|(?:thinspace|quad|qquad)(?![A-Za-z]))|~"
THOUSANDS_MARK = rf"(?:\{{,\}}|,\\!|,\s*\\!|{GAP}| |')"
GROUPED = re.compile(rf"(?<![0-9.,])[0-9]{{1,3}}(?:{THOUSANDS_MARK}[0-9]{{3}})+(?![0-9])")


def _set_of_numbers(match: re.Match[str]) -> str:
    return "ℝℤℕℚℂ"["RZNQC".index(match[1] or match[0][1])] + " "


def _binomial(match: re.Match[str]) -> str:
    return rf"\binom{{{match[1] or match[2]}}}{{{match[3] or match[4]}}}"


REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\\$", "¤USD "),
        (r"\\(?:text)?color\s*\{[^{}]*\}|\\(?:tag|label|phantom|hspace|vspace)\*?\s*\{[^{}]*\}", " "),
        (rf"\\(?:checkmark|square|blacksquare|quad|qquad|enspace|noindent){WORD}|✓|✅", " "),
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (rf"\\(?:displaystyle|textstyle|limits|nolimits|rm|bf|it|large|Large|boldmath){WORD}", ""),
        (rf"\\(?:d|t|c|x)frac{WORD}", r"\\frac"),
        (rf"\\[dt]binom{WORD}", r"\\binom"),
        (rf"\\(le|ge|ne)(?:q|qslant|qq)?{WORD}|\\(le|ge)qslant{WORD}", lambda m: "\\" + (m[1] or m[2]) + " "),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\}])C_(?:\{([0-9]+)\}|([0-9]))\^(?:\{([0-9]+)\}|([0-9]))", _binomial),
        (rf"\\lt{WORD}", "<"),
        (rf"\\gt{WORD}", ">"),
        (r"<=|=<", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=", r"\\ne "),
        (rf"\\varnothing{WORD}|\\O{WORD}", r"\\emptyset "),
        (rf"\\(?:[lr]vert|mid|vert){WORD}", "|"),
        (rf"\\lfloor{WORD}", "⌊"),
        (rf"\\rfloor{WORD}", "⌋"),
        (rf"\\lceil{WORD}", "⌈"),
        (rf"\\rceil{WORD}", "⌉"),
        (rf"\\langle{WORD}", "⟨"),
        (rf"\\rangle{WORD}", "⟩"),
        (rf"\\lbrace{WORD}|\\\{{", "⦃"),
        (rf"\\rbrace{WORD}|\\\}}", "⦄"),
        (rf"\\div{WORD}", "/"),
        (rf"\\(?:ast|star){WORD}", "*"),
        (rf"\\(?:ldots|dots|cdots){WORD}", "..."),
        (rf"\\(?:colon|ratio){WORD}|\{{:\}}", ":"),
        (rf"\\(?:lor|vee){WORD}", " or "),
        (rf"\\(?:land|wedge){WORD}", " and "),
        (rf"\^\s*\{{?\s*\\(?:circ|degree){WORD}\s*\}}?|°|º|\\degree{WORD}", "° "),
        (r"\\%|％", "%"),
        (r"\\mathbb\s*\{?([RZNQC])\}?|\\(?:R|Z|N)(?![A-Za-z])", _set_of_numbers),
        (rf"\\(?:boldsymbol|bm|mathbf|mathit|mathcal|mathsf|mathnormal|ensuremath){WORD}", ""),
        (r"(?<=[0-9A-Za-z)}])\*\*(?=[0-9A-Za-z({-])", "^"),
        (r"\*\*|__", " "),
        (r"[⁰¹²³⁴-⁹⁻ⁿ]+", lambda m: "^{" + m[0].translate(SUPERSCRIPTS) + "}"),
        (r"[₀-₉]+", lambda m: "_{" + m[0].translate(SUBSCRIPTS) + "}"),
        (r"\\sqrt\s*(?=\()", "sqrt"),
        (r"\\sqrt\s*([0-9]+)", r"\\sqrt{\1}"),
        (r"\\\\\s*\[[^\]]*\]", r"\\\\ "),  # the height of a line in a matrix
    ]
]  # fmt: skip
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
    parts, last = [], 0
    for match in BARE_GROUPS.finditer(text):
        before = text[: match.start()]
        depth = sum(before.count(mark) for mark in "([⦃⟨") - sum(before.count(mark) for mark in ")]⦄⟩")
        if depth <= 0:
            parts += [text[last : match.start()], match[0].replace(",", "")]
            last = match.end()
    return "".join([*parts, text[last:]])


OPENING, CLOSING = "([{⦃⟨⌊⌈", ")]}⦄⟩⌋⌉"
ENVIRONMENT = re.compile(r"\\(begin|end)\s*\{[A-Za-z]+\*?\}")


def split_at(text: str, separators: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """The parts between the separators outside of brackets, and these separators."""
    places = [*_outside(text, separators)]
    ends = [0, *(place for match in places for place in match.span()), len(text)]
    parts = [text[start:end].strip() for start, end in [*pairwise(ends)][::2]]
    return parts, [match[0].strip() for match in places]


def _outside(text: str, separators: re.Pattern[str]) -> list[re.Match[str]]:
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
        elif mark in OPENING:
            depth += 1
        elif mark in CLOSING:
            depth -= 1
        for place in range(at, min(at + width, len(text))):
            depths[place] = max(depth, 1) if mark in CLOSING or width > 2 else depth
        at += width
    return [match for match in separators.finditer(text) if depths[match.start()] == 0]
