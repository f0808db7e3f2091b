"""Sync by a model folder: all weights, for engines in other processes when every weight is trained.

The same folder that transformers or vLLM would load. Each push is followed by the parity probe.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.errors import InputError
from podium.sync._delivery import Delivery


class Disk:
    def __init__(
        self,
        delivery: Delivery,
        *,
        root: Annotated[
            Path | None, Field(description="where the engine reads, as seen from here; by default what it says itself")
        ] = None,
        scope: Annotated[
            Literal["run", "engine"],
            Field(description="run: the engine's weights go with the run; engine: they stay and it serves them on"),
        ] = "run",
    ) -> None:
        self._delivery, self._root, self._scope = delivery, root, scope
        engine: Any = delivery.engine
        self._claim = engine.claim if getattr(engine, "outlives_run", False) else None
        if scope == "engine" and self._claim is None:
            raise InputError(
                "sync.scope = 'engine' has no effect: this engine ends with the run; remove it, or use a server"
            )

    async def push(self, version: int) -> None:
        await self._delivery.once(version, self._carry)

    def close(self) -> None:
        self._delivery.remove_folders()

    async def _carry(self, version: int) -> None:
        if self._claim is not None:
            await self._claim(self._delivery.run_id, self._scope)
        await self._delivery.by_folder(self._root, version)
