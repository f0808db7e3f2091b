"""The temperatures that rollouts can be sampled at, the same in settings and in requests to a server."""

from typing import Annotated

from pydantic import AfterValidator, Field

MIN_TEMPERATURE = 1e-3


def sane_temperature(temperature: float) -> float:
    """Logits over less would be infinite."""
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"give 0 for greedy answers, or at least {MIN_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(sane_temperature)]
