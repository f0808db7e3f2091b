"""The trainer and its policy in one process: this one, a rank, a Ray actor or a Flyte container.

In: settings. Out: `HostedTrainer`, on which every runtime's trainer is built; a runtime adds only how calls reach it.
"""

from pathlib import Path
from typing import Any

from podium.loss.build import build_objective
from podium.model.device_thread import on_device_thread
from podium.model.evidence import Held, difference
from podium.model.handoff import publish
from podium.model.load import load_policy
from podium.run.build import load_start
from podium.runtime.ranks.line import Line, RankedTrainer
from podium.runtime.wiring.memory import MemoryPlan, memory_plan
from podium.settings.tables import Settings
from podium.sync._delivery import check_finite
from podium.trainer.build import build_trainer


class HostedTrainer:
    """Loads the policy at once; `build` makes the trainer, once the data is known."""

    memory: MemoryPlan
    own: Any
    """The trainer of this process alone."""
    trainer: Any
    """On rank 0 of several, the trainers of all ranks; else `own`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.policy = load_policy(settings.model, seed=settings.run.seed)

    def plan_memory(self, longest_prompt: int) -> MemoryPlan:
        """`longest_prompt` in tokens, of the training data."""
        self.memory = memory_plan(self.settings, self.policy, longest_prompt)
        return self.memory

    def build(self, num_steps: int, line: Line | None = None) -> None:
        """After `plan_memory`. `line`: this process is one of several ranks."""
        if line is not None:
            line.note_loaded(self.policy)
        objective, checkpointing = build_objective(self.settings), self.memory.gradient_checkpointing
        self.own = build_trainer(self.settings, self.policy, objective, num_steps, checkpointing)
        self.trainer = self.own if line is None or line.rank else RankedTrainer(self.own, line)

    def load_start(self) -> None:
        """Gives the trainer the weights that a new run starts from."""
        load_start(self.settings, self.policy, self.trainer)

    async def check_finite(self, when: str) -> None:
        """Raises `WeightsError` unless every trained weight is a finite number."""
        await on_device_thread(check_finite, self.trainer.weights(), when)

    def publish(self, root: Path, version: int) -> Path:
        """Writes the weights for engines; the folder that holds them."""
        return publish(root, self.policy, self.trainer.weights(), version)

    async def difference(self, held: Held) -> str | None:
        """What differs between an engine's weights and the trainer's; None where they are the same."""
        scale = None if self.policy.peft is None else self.policy.adapter_scale
        return await on_device_thread(difference, self.trainer.weights(), held, scale)
