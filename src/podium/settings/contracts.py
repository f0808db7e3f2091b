"""What settings may name and hold: stages that the user wrote, and the types of values.

Objects named as `module:object` are checked here, before the run starts where that is possible: their arguments, their
methods, and the exceptions they raise. Tests hold Podium's own choices to the same contract.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from podium.errors import InputError, PodiumError
from podium.records import EngineTraits

HANDED: dict[str, tuple[str, ...]] = {
    "data": (),
    "rollout": ("engine", "tokenizer", "stop_ids", "vocabulary", "rollouts_per_prompt", "seed", "purpose"),
    "environment": (),
    "engine": ("policy", "snapshot"),
    "reward": ("prompt", "rollout"),
    "advantage": ("rewards",),
    "filter": ("group",),
    "loss": ("policy_logprobs", "old_logprobs", "batch"),
    "trainer": ("policy", "loss", "steps", "reference", "shared_prefix"),
    "sync": ("delivery",),
    "report": (),
    "runtime": ("settings", "folder", "step"),
}
"""Positional arguments that each stage is called with."""
ON_DEMAND = {"engine": ("compute_dtype", "overlaps", "in_flight", "on_event"), "report": ("folder",)}
"""Passed by keyword too where the signature has a parameter of that name; such a parameter stands before the `*`."""
METHODS = {
    "rollout": ("start",),
    "environment": ("reset", "step"),
    "engine": ("generate", "release", "score", "close"),
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
    if not is_users(name) or is_elsewhere or stage == "tool":  # classes of rewards, and tools, have rules of their own
        return
    signature = signature_of(f"{where} = {name!r}", thing)
    handed, wanted = HANDED[stage], [key for key in ON_DEMAND.get(stage, ()) if key in signature.parameters]
    try:
        signature.bind(*handed, **dict.fromkeys(wanted), **options)
    except TypeError as error:
        raise InputError(
            f"{where} = {name!r} cannot be used as the {stage}: it is called with ({', '.join([*handed, *wanted])}) "
            f"and its options as keywords, but: {error}"
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
    if stage == "engine":
        check_traits(what, thing)


def check_traits(what: str, thing: Any) -> None:
    """An engine has traits, and the methods that its traits promise."""
    traits = getattr(thing, "traits", None)
    if not isinstance(traits, EngineTraits):
        raise InputError(
            f"{what}, which cannot be used as the engine: its attribute 'traits' is {traits!r}; give "
            'traits = podium.records.EngineTraits(channels=("shared",)), which says what the engine can do'
        )
    for method in _promised_methods(traits):
        if not callable(getattr(thing, method, None)):
            raise InputError(
                f"{what}, which cannot be used as the engine: its traits promise a method {method!r}, which it does "
                "not have; add the method or change the traits"
            )


def _promised_methods(traits: EngineTraits) -> list[str]:
    """Methods that an engine with these traits has in addition to those of every engine."""
    methods = ["load_weights"] if "shared" in traits.channels else []
    methods += ["load_folder"] if {"adapter", "disk"} & set(traits.channels) else []
    methods += ["claim"] if traits.outlives_run else []
    each = "_each" if traits.has_members else ""
    methods += [f"score{each}"]
    methods += [f"held{each}"] if traits.shows_weights else []
    return methods


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


# Values: temperatures, shares of probability, paths, names of models

MIN_TEMPERATURE = 1e-3
MIN_TOP_P = 1e-6


def sane_temperature(temperature: float) -> float:
    """Logits over less would be infinite."""
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"give 0 for greedy answers, or at least {MIN_TEMPERATURE:g}")
    return temperature


def sane_top_p(top_p: float) -> float:
    """Smaller values round to 0 when probabilities are summed, so that no token would be left."""
    if top_p < MIN_TOP_P:
        raise ValueError(f"give at least {MIN_TOP_P:g}; for the likeliest token alone set temperature = 0")
    return top_p


TopP = Annotated[float, Field(gt=0, le=1), AfterValidator(sane_top_p)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(sane_temperature)]


def _sane_path(path: Path) -> Path:
    """Names that no file system takes are an error here, and not wherever they are first used."""
    if "\0" in str(path) or len(str(path)) > 4000 or any(len(part.encode()) > 255 for part in path.parts):
        raise ValueError("a path has at most 4000 characters, 255 in each part, and no NUL character")
    return path


Place = Annotated[Path, AfterValidator(_sane_path)]
ModelName = Annotated[str, Field(min_length=1, max_length=4000, pattern=r"^[^\x00]*$")]
