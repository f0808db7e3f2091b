"""Checks stages that the user wrote: their arguments, their methods, and the exceptions they raise.

Tests hold Podium's own choices to the same contract. Objects named as `module:object` are checked here, before the run
starts where that is possible.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from podium.errors import InputError, PodiumError

HANDED: dict[str, tuple[str, ...]] = {
    "data": (),
    "rollout": ("engine", "tokenizer", "stop_ids", "vocabulary", "rollouts_per_prompt", "seed", "purpose"),
    "engine": ("policy", "snapshot"),
    "reward": ("prompt", "rollout"),
    "advantage": ("rewards",),
    "filter": ("group",),
    "loss": ("policy_logprobs", "old_logprobs", "batch"),
    "trainer": ("policy", "loss", "steps", "reference", "shared_prefix"),
    "sync": ("delivery",),
    "report": (),
    "runtime": ("settings", "folder", "stop_requested", "step", "console_mode"),
}
"""Positional arguments that each stage is called with."""
ON_DEMAND = {"engine": ("compute_dtype", "overlaps"), "report": ("folder",)}
"""Handed too where the signature has an argument of that name."""
METHODS = {
    "rollout": ("start",),
    "engine": ("generate", "score", "close"),
    "trainer": ("step", "score", "weights", "state"),
    "sync": ("push", "close"),
    "report": ("start", "write", "finish"),
}


def is_users(name: str) -> bool:
    """Whether the name is of user code, `module:object`."""
    return ":" in name


def check_call(stage: str, where: str, name: str, thing: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Whether `thing` can be called as its stage is, and, if it is a class, whether it has the methods."""
    is_elsewhere = stage == "reward" and (inspect.isclass(thing) or name.startswith("__main__:"))
    if not is_users(name) or is_elsewhere:  # rewards that are classes have rules of their own
        return
    signature = signature_of(f"{where} = {name!r}", thing)
    handed = (*HANDED[stage], *(key for key in ON_DEMAND.get(stage, ()) if key in signature.parameters))
    try:
        signature.bind(*handed, **options)
    except TypeError as error:
        raise InputError(
            f"{where} = {name!r} cannot be used as the {stage}: it is called with ({', '.join(handed)}) and its "
            f"options as keywords, but: {error}"
        ) from None
    if stage in METHODS and inspect.isbuiltin(thing):
        raise InputError(f"{where} = {name!r} cannot be used as the {stage}: a built-in function makes none")
    if inspect.isclass(thing) and not hasattr(thing, "__getattr__"):
        _check_methods(stage, f"{where} = {name!r}", thing)


def signature_of(what: str, thing: Callable[..., Any]) -> inspect.Signature:
    """The signature with its annotations evaluated. Raises `InputError` if it cannot be read."""
    try:
        return inspect.signature(thing, eval_str=True)
    except Exception as error:  # an annotation is user code too
        raise InputError(
            f"{what}: its arguments cannot be read: {type(error).__name__}: {error}; give a Python function or class"
        ) from None


def checked(stage: str, name: str, made: Any) -> Any:
    """What a user's function or class made, if it has the methods of its stage."""
    if is_users(name):
        _check_methods(stage, f"{stage}.name = {name!r} made a {type(made).__name__}", made)
    return made


def _check_methods(stage: str, what: str, thing: Any) -> None:
    missing = [method for method in METHODS.get(stage, ()) if not callable(getattr(thing, method, None))]
    if missing:
        raise InputError(
            f"{what}, which cannot be used as the {stage}: it has no method {missing[0]!r}; needed: "
            f"{', '.join(METHODS[stage])}"
        )


@contextmanager
def user_code(what: str, name: str) -> Iterator[None]:
    """Wraps a call into user code. Turns its exception into an `InputError` that names the setting, file and line."""
    try:
        yield
    except PodiumError:
        raise
    except (Exception, SystemExit) as error:
        if not is_users(name) or type(error).__name__ == "OutOfMemoryError":  # the trainer cuts its batches then
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise InputError(
            f"{what} = {name!r} failed: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
        ) from error
