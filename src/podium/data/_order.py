"""Rows to prompts in the run's order.

Row of ordinal i: place i mod rows in a shuffle that depends on (seed, epoch) alone. So the cursor of a run is one
number, and a resumed run goes on with the very prompts that the unbroken one would have taken. Prompts that are too
long keep their ordinal and are skipped.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from podium.errors import InputError
from podium.model.chat import render
from podium.records import Plan, Prompt, Row, RunState


class OrderedData:
    """Stage 1: the rows of all sources, rendered once, served by ordinal."""

    def __init__(
        self,
        rows: Sequence[Row],
        limits: Sequence[int],
        tokenizer: Any,
        plan: Plan,
        seed: int,
        system: str | None = None,
    ) -> None:
        """`limits` has each row's longest prompt in tokens."""
        if not rows:
            raise InputError("data: the sources hold no rows; give a file or a split that has some")
        self._rows, self._plan, self._seed = rows, plan, seed
        self._ids = [_rendered(tokenizer, number, row, system) for number, row in enumerate(rows, start=1)]
        self.num_rows = len(rows)
        self.is_kept = [0 < len(ids) <= limit for ids, limit in zip(self._ids, limits, strict=True)]
        if not any(self.is_kept):
            raise InputError(
                f"data: none of the {len(rows)} prompts fits: the shortest has {min(map(len, self._ids))} tokens and "
                f"{max(limits)} are allowed; raise max_prompt_tokens or lower rollout.max_new_tokens"
            )
        self._shuffle = lru_cache(maxsize=4)(self._shuffle_epoch)

    @property
    def num_dropped(self) -> int:
        """Rows whose prompt is too long."""
        return self.is_kept.count(False)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt that is kept."""
        return [len(ids) for ids, kept in zip(self._ids, self.is_kept, strict=True) if kept]

    @property
    def rows(self) -> Sequence[Row]:
        """Every row, the dropped ones too, in the order of the sources."""
        return self._rows

    @property
    def reward_choices(self) -> set[tuple[str, ...]]:
        """Every combination of rewards that a row names; () where it names none."""
        return {tuple(row.reward) for row in self._rows}

    @property
    def num_steps(self) -> int:
        """Steps until the plan's steps or epochs are done, whichever comes first."""
        if self._plan.epochs is None:
            return self._plan.steps
        prompts = self._plan.epochs * self.is_kept.count(True)
        return min(self._plan.steps, -(-prompts // self._plan.prompts_per_step))

    @property
    def fingerprint(self) -> str:
        """Changes when any row, its rendering or its place does: a resume refuses other data."""
        digest = hashlib.sha256()
        for row, ids in zip(self._rows, self._ids, strict=True):
            digest.update(json.dumps([row.answer, row.reward, row.metadata, ids], default=str).encode())
        return digest.hexdigest()

    def windows(self, state: RunState) -> Iterator[list[Prompt]]:
        """From the frontier on, `prompts_per_window` prompts at a time, until the plan's steps or epochs are done."""
        plan, ordinal, step = self._plan, state.next_ordinal, state.step
        end = None if plan.epochs is None else plan.epochs * self.num_rows
        while step < plan.steps:
            wanted = min(plan.prompts_per_window, (plan.steps - step) * plan.prompts_per_step)
            window: list[Prompt] = []
            while len(window) < wanted and (end is None or ordinal < end):
                if (prompt := self.prompt(ordinal)) is not None:
                    window.append(prompt)
                ordinal += 1
            if not window:
                return
            yield window
            step += -(-len(window) // plan.prompts_per_step)

    def prompt(self, ordinal: int) -> Prompt | None:
        """The prompt with that ordinal; None if it is too long."""
        epoch, place = divmod(ordinal, self.num_rows)
        index = self._shuffle(epoch)[place]
        if not self.is_kept[index]:
            return None
        row = self._rows[index]
        return Prompt(ordinal, self._ids[index], row.messages, row.answer, row.reward, row.source, row.metadata)

    def in_order(self, count: int | None = None) -> list[Prompt]:
        """Every kept row once, unshuffled: for evaluation."""
        prompts = [
            Prompt(index, self._ids[index], row.messages, row.answer, row.reward, row.source, row.metadata)
            for index, row in enumerate(self._rows)
            if self.is_kept[index]
        ]
        return prompts[:count]

    def _shuffle_epoch(self, epoch: int) -> list[int]:
        order = list(range(self.num_rows))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order


def _rendered(tokenizer: Any, number: int, row: Row, system: str | None) -> tuple[int, ...]:
    try:
        return render(tokenizer, row.messages, system)
    except InputError as error:
        raise InputError(f"row {number} of {row.source or 'the data'}: {error}") from None
