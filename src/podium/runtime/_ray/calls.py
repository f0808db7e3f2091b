"""Calls of actors, where every failure has a name: the error that the actor raised, or that it is gone."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from podium.errors import EngineError, InputError, PodiumError, ProvisionError


@contextmanager
def named(who: str, lost: type[PodiumError] = EngineError) -> Iterator[None]:
    """`lost` is raised where the actor, or what it held, is gone."""
    try:
        yield
    except RayTaskError as error:
        raise _cause(error, who, lost) from None
    except RayActorError as error:
        raise lost(f"{who} is gone: {_how(error)}") from None
    except GetTimeoutError:
        raise lost(f"{who} did not answer in time") from None
    except RayError as error:
        raise lost(f"{who}: {type(error).__name__}: {_first_line(error)}") from None


def all_of(calls: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """What each call returned, by name; if some failed, one error that lists every one of them."""
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=limit_s)
    found: dict[str, Any] = {}
    problems: dict[str, PodiumError] = {}
    for name, call in calls.items():
        try:
            with named("it", ProvisionError):
                found[name] = ray.get(call, timeout=0.0)
        except PodiumError as error:
            problems[name] = error
    if problems:
        raise as_one(problems, len(calls))
    return found


def as_one(problems: Mapping[str, PodiumError], of: int, what: str = "workers could not be made ready") -> PodiumError:
    """An `InputError` where each of them is one; those who say the same are listed together."""
    by_text: dict[str, list[str]] = {}
    for name, error in problems.items():
        by_text.setdefault(str(error), []).append(name)
    listed = "\n".join(f"  {', '.join(names)}: {text}" for text, names in by_text.items())
    kind = InputError if all(isinstance(error, InputError) for error in problems.values()) else ProvisionError
    return kind(f"{len(problems)} of {of} {what}:\n{listed}")


def _cause(error: RayTaskError, who: str, lost: type[PodiumError]) -> PodiumError:
    cause = error.cause
    if isinstance(cause, PodiumError):
        return cause
    if isinstance(cause, RayActorError):
        return lost(f"{who} is gone: {_how(cause)}")
    return lost(f"{who} failed: {type(cause).__name__}: {_first_line(cause)}")


def _how(error: RayActorError) -> str:
    """Ray's own words for how it ended, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reasons = [line for line in lines if line.startswith("The actor")]
    return (reasons or lines or ["no reason given"])[-1][:300]


def _first_line(error: BaseException | None) -> str:
    return (str(error).splitlines() or [""])[0][:300]
