"""Values that settings and requests may have: paths, names of models, temperatures, shares of probability."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

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
