"""Exact arithmetic, for models that reckon unreliably."""

import ast
import operator
import warnings
from fractions import Fraction

MAX_DIGITS = 1000
MAX_EXPONENT = 1000
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculator(expression: str) -> str:
    """Computes an expression of numbers with + - * / // % ** and parentheses exactly, such as (3 + 4) * 2.

    A result that is no whole number is given with up to twelve digits.
    """
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/")
    with warnings.catch_warnings(action="ignore"):  # Python's own, about what the policy wrote
        made = _value(ast.parse(text, mode="eval").body)
    if made.denominator == 1:
        return str(made.numerator)
    return f"{float(made):.12g}"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(Fraction(str(number)))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            return _value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            base, exponent = _value(node.left), _value(node.right)
            if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
                raise ValueError(f"an exponent must be a whole number of at most {MAX_EXPONENT}")
            if abs(exponent) * len(str(max(abs(base.numerator), base.denominator))) > MAX_DIGITS * 2:
                raise ValueError(f"numbers have at most {MAX_DIGITS} digits")
            return _bounded(base ** int(exponent))
        case ast.BinOp(op=op) if type(op) in OPERATIONS:
            return _bounded(Fraction(OPERATIONS[type(op)](_value(node.left), _value(node.right))))
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"numbers have at most {MAX_DIGITS} digits")
    return value
