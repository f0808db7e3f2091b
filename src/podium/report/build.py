"""From `[[report]]` to the report stage.

In: the settings and what is known of the run. Out: `Reports`, which writes the step's report to every place where
people look. `jsonl`, the ledger of the run, is always one of them.
"""

import importlib.util
import inspect
from collections.abc import Sequence
from typing import Any

from podium.errors import InputError
from podium.report.dispatch.reports import Reports
from podium.report.jsonl import Jsonl, Pieces, piece_decoder
from podium.report.page import Page
from podium.report.web.reader import run_card
from podium.run.folder import Ledger, RunFolder
from podium.settings.contracts import checked, user_code
from podium.settings.lookup import find
from podium.settings.sections import Choice
from podium.settings.tables import Settings


def check_reports(settings: Settings) -> None:
    """A tracker whose package is not installed is an error before the model is loaded."""
    for choice in settings.report:
        package = getattr(find("report", choice.name), "package", None)
        if package is not None and importlib.util.find_spec(package) is None:
            remedy = f"pip install 'podium-rl[{choice.name}]'"
            raise InputError(f"report {choice.name!r} needs {package}, which is not installed: {remedy}")


def build_reports(
    settings: Settings,
    folder: RunFolder,
    ledger: Ledger,
    console_mode: str | None,
    tokenizer: Any,
    num_steps: int,
    max_tokens_per_batch: int,
    notes: Sequence[str] = (),
    page: type[Page] | None = None,
) -> Reports:
    """`console_mode` holds for this process only and is not saved with the run. `notes` are sentences about the data.
    `page` is written in place of the report `page`, even where the settings do not name it."""
    pieces = Pieces(folder.tokens, piece_decoder(tokenizer))
    made = [Jsonl(ledger, pieces), *_chosen_reports(settings, folder, console_mode)]
    if page is not None:
        made = [*(report for report in made if not isinstance(report, Page)), page(folder)]
    card = run_card(settings.to_dict(), folder.path, num_steps)
    return Reports(made, folder, ledger, card, settings.to_toml(), max_tokens_per_batch, notes)


def _chosen_reports(settings: Settings, folder: RunFolder, console_mode: str | None) -> list[Any]:
    """A report whose first argument is called `folder` is given the run folder; the console is given its mode."""
    given = list(settings.report)
    if any(choice.name == "jsonl" for choice in given):
        raise InputError("report 'jsonl' has no effect: it is always written; remove its table")
    if console_mode is not None and all(choice.name != "console" for choice in given):
        given.insert(0, Choice(name="console"))
    made: list[Any] = []
    for choice in given:
        make = find("report", choice.name)
        handed: list[Any] = [folder] if "folder" in inspect.signature(make).parameters else []
        if choice.name == "console":
            handed = [console_mode or "auto"]
        with user_code("report.name", choice.name):
            made.append(checked("report", choice.name, make(*handed, **choice.options)))
    return made
