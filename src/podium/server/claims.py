"""Which run owns the engine's weights.

A run claims the engine before it pushes and releases it when it ends. Its scope says what then becomes of the weights:
`run`: they go with it; `engine`: they stay and are served on. One engine has one run and one scope at a time.
"""

import time
from dataclasses import dataclass
from typing import Literal

from podium.server.refusal import Refusal

Scope = Literal["run", "engine"]
IDLE_S = 900.0
"""A run that said nothing for so long may be dead: another may take its place. If it lives, it is told."""


@dataclass
class Claim:
    run: str
    scope: Scope
    seen: float


class Claims:
    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._held: Claim | None = None
        self._kept: Claim | None = None
        """Of the run whose weights stay though it has ended."""

    @property
    def run(self) -> str | None:
        return self._held.run if self._held else None

    def take(self, run: str, scope: Scope) -> None:
        held, kept = self._held, self._kept
        if held is not None and held.run != run and time.monotonic() - held.seen < self._idle_s:
            raise Refusal(409, f"the engine is claimed by run {held.run!r} (scope {held.scope!r})")
        if held is not None and held.run == run and held.scope != scope:
            raise Refusal(409, f"run {run!r} has claimed the engine with scope {held.scope!r}, not {scope!r}")
        if kept is not None and kept.scope != scope:
            raise Refusal(
                409,
                f"the engine keeps the weights of run {kept.run!r} (scope {kept.scope!r}); scope {scope!r} would take "
                f"them away: use scope {kept.scope!r}, or another engine",
            )
        self._held = Claim(run, scope, time.monotonic())

    def check(self, run: str | None) -> None:
        """Refuses a run that has lost its claim; one that has it is alive. Whoever names no run only reads."""
        held = self._held
        if run is None:
            return
        if held is None or held.run != run:
            holder = f"run {held.run!r} has" if held else "nobody has"
            raise Refusal(409, f"run {run!r} has no claim on this engine, {holder}")
        held.seen = time.monotonic()

    def check_writer(self, run: str | None) -> None:
        """Weights are changed by whoever holds the claim; by anybody while nobody does."""
        if run is None and self._held is not None:
            raise Refusal(409, f"the engine is claimed by run {self._held.run!r} (scope {self._held.scope!r})")
        self.check(run)

    def release(self, run: str) -> Scope | None:
        """The scope of the claim that ends; None where the run had none."""
        held = self._held
        if held is None or held.run != run:
            return None
        self._held = None
        if held.scope == "engine":
            self._kept = held
        return held.scope
