"""A stage with something around one of its calls."""

from typing import Any


class Around:
    """Whoever is laid around a stage writes the call that it is about; everything else is the stage's own."""

    def __init__(self, stage: Any) -> None:
        self._stage = stage

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)
