"""Options of one trainer that another has too, without writing them twice."""

import inspect
from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C", bound=type)


def with_options_of(other: type) -> Callable[[C], C]:
    """A class decorator: its signature gets the keyword-only arguments of `other`, which its `**options` takes."""

    def decorate(own: C) -> C:
        signature = inspect.signature(own, eval_str=True)
        mine = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        theirs = inspect.signature(other, eval_str=True).parameters.values()
        names = {parameter.name for parameter in mine}
        more = [p for p in theirs if p.kind is p.KEYWORD_ONLY and p.name not in names]
        own.__signature__ = signature.replace(parameters=[*mine, *more])  # type: ignore[attr-defined]
        return own

    return decorate
