"""From settings to the places where people look."""

import importlib.util
import inspect
from typing import Any

from podium.contracts import checked, user_code
from podium.errors import InputError
from podium.ledger import Ledger
from podium.lookup import find
from podium.report._pieces import Pieces
from podium.report.jsonl import Jsonl
from podium.run_folder import RunFolder
from podium.sections import Choice
from podium.settings import Settings


def check_reports(settings: Settings) -> None:
    """A tracker whose package is not installed is an error before the model is loaded."""
    for choice in settings.report:
        package = getattr(find("report", choice.name), "package", None)
        if package is not None and importlib.util.find_spec(package) is None:
            remedy = f"pip install 'podium-rl[{choice.name}]'"
            raise InputError(f"report {choice.name!r} needs {package}, which is not installed: {remedy}")


def build_reports(
    settings: Settings, folder: RunFolder, ledger: Ledger, console_mode: str | None, pieces: Pieces | None = None
) -> list[Any]:
    """`jsonl` always, then the settings'; `console_mode` is for this process only and is not saved with the run.

    A report whose first argument is called `folder` is handed the run folder.
    """
    given = list(settings.report)
    if any(choice.name == "jsonl" for choice in given):
        raise InputError("report 'jsonl' has no effect: it is always written; remove its table")
    if console_mode is not None:
        console = Choice.model_validate({"name": "console", "mode": console_mode})
        given = [console, *(choice for choice in given if choice.name != "console")]
    made: list[Any] = [Jsonl(ledger, pieces)]
    for choice in given:
        make = find("report", choice.name)
        wants_folder = "folder" in inspect.signature(make).parameters
        with user_code("report.name", choice.name):
            made.append(checked("report", choice.name, make(*([folder] if wants_folder else []), **choice.options)))
    return made
