"""Names of files, folders and models, as settings may give them."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field


def _sane_path(path: Path) -> Path:
    """Names that no file system takes are an error here, and not wherever they are first used."""
    if "\0" in str(path) or len(str(path)) > 4000 or any(len(part.encode()) > 255 for part in path.parts):
        raise ValueError("a path has at most 4000 characters, 255 in each part, and no NUL character")
    return path


Place = Annotated[Path, AfterValidator(_sane_path)]
Word = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^/\x00-\x1f\x7f]*$")]
"""Goes into the name of a folder."""
ModelName = Annotated[str, Field(min_length=1, max_length=4000, pattern=r"^[^\x00]*$")]
