"""The kinds of answers."""

from dataclasses import dataclass, field

from podium.reward._math_number import Node
from podium.reward._math_units import Unit


@dataclass(frozen=True)
class Amount:
    """A number or an expression, perhaps with a unit."""

    value: Node
    units: tuple[Unit | None, ...] = (None,)
    """What its unit may be."""
    needs_unit: bool = False
    """Whether it may be a product instead (`5m`), so that it is no bare number."""


@dataclass(frozen=True)
class Items:
    """Several answers: `list` (bare), `set`, or by its brackets: `()`, `[]`, `[)`, `(]`, `⟨⟩`."""

    kind: str
    items: tuple["Answer", ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of answers."""

    rows: tuple[tuple["Answer", ...], ...]


@dataclass(frozen=True)
class Region:
    """A set of numbers, of a kind with its parts.

    `all`; `points`; `interval` of two ends and its brackets; `where` of two sides and their relation; `union`, `both`
    and `minus` of other sets.
    """

    kind: str
    parts: tuple["Region | Node | str", ...]
    variable: str | None = None


@dataclass(frozen=True)
class Equation:
    """Sides that are said to be equal; the texts of the sides are kept for names."""

    sides: tuple[str, ...]


@dataclass(frozen=True)
class Inequality:
    """An inequality in several variables: what is below zero, and whether it may be zero."""

    below: Node
    is_strict: bool


@dataclass(frozen=True)
class Congruence:
    """Residues by a modulus."""

    name: str
    residues: "Answer"
    modulus: Node


@dataclass(frozen=True)
class Clock:
    """A time of day in minutes; without a half of the day it may be either."""

    minutes: int
    is_certain: bool


@dataclass(frozen=True)
class Ratio:
    """a : b : c"""

    terms: tuple[Node, ...]


@dataclass(frozen=True)
class Words:
    """Anything else, in small letters; and as it was."""

    text: str
    source: str = field(default="", compare=False)


Answer = Amount | Items | Matrix | Region | Equation | Inequality | Congruence | Clock | Ratio | Words
