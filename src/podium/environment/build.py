"""From `[[tool]]` and `[environment]` to what an episode needs: the recipe for workers, and the tool descriptions."""

import inspect
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from podium.environment.episode.calls import format_of, schema_of
from podium.environment.episode.served import EpisodeRecipe, ToolRecipe, brings_several, callable_of, tool_name
from podium.environment.episode.world import Playground
from podium.errors import InputError
from podium.settings.lookup import find
from podium.settings.sections import Choice
from podium.settings.tables import Settings


def build_playground(settings: Settings, tokenizer: Any) -> Playground:
    """Checks every tool's signature. Starts nothing."""
    schemas, stateful, recipes = {}, set(), []
    for index, choice in enumerate(settings.tool):
        where, found = f"tool[{index}].name = {choice.name!r}", find("tool", choice.name, f"tool[{index}].name")
        _check_package("tool", choice.name, found)
        own = _schemas(where, choice.name, found, choice.options)
        if clash := schemas.keys() & own.keys():
            raise InputError(f"{where}: there is another tool called {min(clash)!r}; rename one of the functions")
        schemas |= own
        recipes.append(ToolRecipe(choice.name, _plain(choice), tuple(own)))
        stateful |= own.keys() if inspect.isclass(found) else set()
    environment = settings.environment
    if environment is not None:
        _check_package("environment", environment.name, find("environment", environment.name))
    recipe = EpisodeRecipe(
        tools=tuple(recipes),
        environment=environment.name if environment else "",
        options=_plain(environment) if environment else {},
    )
    template = getattr(tokenizer, "chat_template", None)
    chosen = settings.rollout.options.get("call_format", "auto")
    call_format = format_of(template if schemas else None, None if chosen == "auto" else chosen)
    return Playground(
        recipe, tuple(schemas.values()), frozenset(stateful), call_format, environment.reward if environment else "sum"
    )


def _plain(choice: Choice) -> dict[str, Any]:
    """The options as they stand in a settings file."""
    return {key: value for key, value in choice.model_dump(mode="json").items() if key in choice.options}


def _check_package(stage: str, name: str, found: Any) -> None:
    package = getattr(found, "package", None)
    if package is not None and find_spec(package) is None:
        remedy = f"pip install 'podium-rl[{name}]'"
        raise InputError(f"{stage}.name = {name!r} needs the package {package}, which is not installed: {remedy}")


def _schemas(where: str, name: str, found: Any, options: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The functions of one tool, by the name that the policy calls."""
    try:
        if brings_several(found):
            return {each["function"]["name"]: each for each in found.schemas(**options)}
        return {tool_name(name): schema_of(tool_name(name), callable_of(found), inspect.getdoc(found))}
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{where}: its functions cannot be described: {type(error).__name__}: {error}") from None
