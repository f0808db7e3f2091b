"""Sync through a model folder with all weights, for engines in other processes when every weight is trained.

transformers or vLLM could load the same folder. The parity check follows each push.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from podium.errors import InputError
from podium.sync import Channel, Delivery


class Disk(Channel):
    def __init__(
        self,
        delivery: Delivery,
        *,
        root: Annotated[
            Path | None, Field(description="the engine's weights folder, as a path on this machine; default: its own")
        ] = None,
        scope: Annotated[
            Literal["run", "engine"],
            Field(description="run: the engine drops the weights when the run ends; engine: it keeps serving them"),
        ] = "run",
    ) -> None:
        super().__init__(delivery)
        self._root, self._scope = root, scope
        engine: Any = delivery.engine
        self._claim = engine.claim if engine.traits.outlives_run else None
        if scope == "engine" and self._claim is None:
            raise InputError(
                "sync.scope = 'engine' has no effect: this engine ends with the run; remove it, or use a server"
            )

    async def _carry(self, version: int) -> None:
        if self._claim is not None:
            await self._claim(self._delivery.run_id, self._scope)
        await self._delivery.by_folder(self._root, version)
