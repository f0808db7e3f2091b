"""The words after a number: a unit with a dimension and a size, a word such as `million`, or the things counted.

`5 cm` and `50 mm` have the same dimension and can be compared; `5 cm` and `5 cm²` cannot; `12 apples` are no oranges.
Number words (`twelve`, `two dozen`) are read here too.
"""

import re
from dataclasses import dataclass
from fractions import Fraction


def _words(text: str) -> list[str]:
    return text.split()


SCALES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15,
    "dozen": 12, "mn": 10**6, "bn": 10**9,
}  # fmt: skip

SIZES = {  # dimension: unit: (size, names)
    "length": {
        "1/1000": "mm millimeter millimetre", "1/100": "cm centimeter centimetre", "1": "m meter metre",
        "1/10": "dm decimeter decimetre", "1000": "km kilometer kilometre", "0.0254": "in inch inches",
        "0.3048": "ft foot feet", "0.9144": "yd yard", "1609.344": "mi mile", "1e-9": "nm nanometer nanometre",
    },
    "mass": {
        "1/1000": "mg milligram", "1": "g gram", "1000": "kg kilogram kilo", "1000000": "ton tonne",
        "453.59237": "lb pound", "28.349523125": "oz ounce",
    },
    "time": {
        "1/1000": "ms millisecond", "1": "s sec second", "60": "min minute", "3600": "h hr hour", "86400": "day",
        "604800": "week wk",
    },
    "month": {"1": "month", "12": "year yr", "120": "decade", "1200": "century centuries"},
    "cubic length": {
        "1/1000000": "ml milliliter millilitre", "1/1000": "l liter litre", "0.003785411784": "gallon gal",
    },
    "dollar": {"1": "dollar usd buck", "1/100": "cent"},
    "euro": {"1": "euro eur"},
    "sterling": {"1": "gbp quid sterling", "1/100": "penny pence"},
    "yen": {"1": "yen jpy"},
    "rupee": {"1": "rupee inr"},
    "angle": {"1": "degree deg", "1/60": "arcminute"},
    "radian": {"1": "radian rad"},
    "celsius": {"1": "celsius"}, "fahrenheit": {"1": "fahrenheit"}, "kelvin": {"1": "kelvin"},
    "force": {"1": "newton"}, "energy": {"1": "joule j", "1000": "kj kilojoule"}, "power": {"1": "watt", "1000": "kw"},
    "potential": {"1": "volt"}, "current": {"1": "ampere amp"}, "frequency": {"1": "hz hertz"},
    "percent": {"1/100": "% percent percentage"},
}  # fmt: skip
UNITS = {
    name: (dimension, Fraction(size))
    for dimension, units in SIZES.items()
    for size, names in units.items()
    for name in names.split()
}
COMPOUNDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "fps": "ft/s", "cc": "cm^3", "sqft": "ft^2"}
CURRENCIES = {"USD": "dollar", "EUR": "euro", "GBP": "sterling", "JPY": "yen", "INR": "rupee"}
POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
FILLERS = _words(
    "a an the of in total altogether whole different distinct possible such old tall long wide high deep away each all "
    "more left remaining approximately about exactly only point unit way time value solution number answer real "
    "per cent integer positive"
)
"""Words that say nothing about what is counted."""
IRREGULAR = {"people": "person", "children": "child", "men": "man", "women": "woman", "mice": "mouse", "geese": "goose"}

ONES = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = _words("twenty thirty forty fifty sixty seventy eighty ninety")
NUMBER_WORDS = {word: value for value, word in enumerate(ONES)} | {
    word: 10 * value for value, word in enumerate(TENS, start=2)
}


@dataclass(frozen=True)
class Unit:
    """Dimensions with their powers and the size in base units, or the things that are counted."""

    dimensions: frozenset[tuple[str, int]] = frozenset()
    size: Fraction = Fraction(1)
    things: frozenset[str] = frozenset()

    @property
    def name(self) -> str | None:
        """The dimension, where it is a single one."""
        return next((name for name, power in self.dimensions if len(self.dimensions) == power == 1), None)


DEGREE = Unit(frozenset([("angle", 1)]))
PERCENT = Unit(frozenset([("percent", 1)]), Fraction(1, 100))


def currency(code: str) -> Unit:
    """The unit of a currency's code."""
    return Unit(frozenset([(CURRENCIES[code], 1)]))


def read_suffix(suffix: str) -> tuple[Fraction, list[Unit | None]] | None:
    """A factor (`million`) and the units that the words after a number may mean; None if they are no words."""
    words = re.sub(r"[⟪⟫{}~()]", " ", suffix).replace(r"\cdot", " ").replace(r"\times", " ").strip(" .")
    words = re.sub(r"\b(units?)\s*\^\s*[23]\b", r"\1", words)
    if not re.fullmatch(r"[A-Za-z%/ .'0-9^°-]*", words):
        return None
    tokens = re.findall(r"[A-Za-z%°']+|[0-9]+|[/^-]", re.sub(r"(?<=[A-Za-z])\.", "", words))
    factor = Fraction(1)
    while tokens and (scale := SCALES.get(tokens[0].lower().removesuffix("s")) or SCALES.get(tokens[0].lower())):
        factor *= scale
        tokens = tokens[1:]
    if tokens and tokens[0] == "of":
        tokens = tokens[1:]
    if not tokens:
        return factor, [None]
    if known := _known(tokens):
        return factor, list(known)
    if any(not re.match("[A-Za-z']", token) for token in tokens):
        return None
    things = frozenset(map(_singular, tokens)).difference(FILLERS)
    measured = [token for token in tokens if re.match("[A-Za-z]{2}", token) and _lookup(token)]
    if measured and (known := _known(tokens[: tokens.index(measured[0]) + 1])):
        rest = frozenset(map(_singular, tokens[tokens.index(measured[0]) + 1 :])).difference(FILLERS)
        return factor, [*known] if not rest or "per" not in tokens else [Unit(things=things)]
    return factor, [Unit(things=things) if things else None]


def _known(tokens: list[str]) -> list[Unit] | None:
    """The units of `m / s ^ 2` or `square miles per hour`; `pounds` has two."""
    spelled = [COMPOUNDS.get(token.lower(), token) for token in tokens]
    tokens = [part for token in spelled for part in re.findall(r"[A-Za-z%]+|[0-9]+|[/^]", token) or [token]]
    if [_singular(token) for token in tokens] == ["pound"]:
        return [Unit(frozenset([("mass", 1)]), Fraction("453.59237")), currency("GBP")]
    powers: dict[str, int] = {}
    size, sign, pending, at = Fraction(1), 1, 1, 0
    while at < len(tokens):
        token = tokens[at]
        at += 1
        if token in ("/", "per"):
            sign = -1
        elif token.lower() in POWERS and (at < len(tokens) and _lookup(tokens[at])):
            pending = POWERS[token.lower()]
        elif _singular(token) in FILLERS and token.lower() not in UNITS and powers:
            continue
        elif found := _lookup(token):
            power, at = _power(tokens, at)
            power = sign * (power if power != 1 else pending)
            name, width = ("length", 3) if found[0] == "cubic length" else (found[0], 1)
            powers[name] = powers.get(name, 0) + width * power
            size *= found[1] ** power
            pending = 1
        else:
            return None
    dimensions = frozenset((name, power) for name, power in powers.items() if power)
    return [Unit(dimensions, size)] if powers else None


def _power(tokens: list[str], at: int) -> tuple[int, int]:
    """The power after a unit, and where it ends."""
    if at < len(tokens) and tokens[at].lower() in ("squared", "cubed"):
        return POWERS[tokens[at].lower()], at + 1
    match = re.match(r"(\^ )?(- )?([1-4])( |$)", " ".join(tokens[at : at + 3]))
    if match is None:
        return 1, at
    return int(match[3]) * (-1 if match[2] else 1), at + sum(group is not None for group in match.groups()[:2]) + 1


def _lookup(token: str) -> tuple[str, Fraction] | None:
    """A unit by its name: in its own spelling, in small letters, without the ending of a plural."""
    small = token.lower()
    return UNITS.get(token) or UNITS.get(small) or (UNITS.get(small.removesuffix("s")) if len(small) > 2 else None)


def _singular(word: str) -> str:
    """`apples` as `apple`, `boxes` as `box`."""
    word = word.lower().strip("'")
    if word in IRREGULAR:
        return IRREGULAR[word]
    if re.search("(?:s|x|z|ch|sh)es$", word):
        return word[:-2]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 2 else word


def is_unit(word: str) -> bool:
    """Whether the word names a unit or a scale."""
    small = word.lower()
    return _lookup(word) is not None or small in COMPOUNDS or small in SCALES or small.removesuffix("s") in SCALES


def number_in_words(text: str) -> tuple[Fraction, str] | None:
    """The number that a text begins with in words, and what follows it."""
    total, current, seen = Fraction(0), Fraction(0), False
    rest = text.strip().lower()
    while match := re.match(r"(?:and\s+)?([a-z]+)[\s-]*", rest):
        word = match[1]
        if word in NUMBER_WORDS:
            current += NUMBER_WORDS[word]
        elif seen and word in SCALES and word not in ("mn", "bn"):
            current *= SCALES[word]
            if word != "hundred":
                total, current = total + current, Fraction(0)
        else:
            break
        seen = True
        rest = rest[match.end() :]
    return (total + current, rest) if seen else None
