"""The numbers that the loops themselves need."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """How much is sampled and trained, and how far sampling may run ahead."""

    steps: int
    """Trainer steps of the whole run."""
    prompts_per_step: int
    rollouts_per_prompt: int
    sync_every: int = 1
    """Steps per policy window; 0 never syncs."""
    max_skipped_steps: int = 50
    """Steps without an update in a row after which the run is given up."""
    epochs: int | None = None
    """Passes over the data after which the run ends early; None has no limit."""
    max_refills: int = 0
    """Rounds in which a window draws what its filter dropped; 0: a step is what was drawn first."""
    retire_pass_rate: float | None = None
    """Share of correct rollouts from which on a row is not drawn again; None retires none."""
    max_lag: int = 0
    """Policy versions that a trained rollout may be behind the trainer; 0 is the strict loop, more the async one."""
    in_flight: bool = False
    """Async loop: whether the engine's weights may change while rollouts are being written."""

    @property
    def prompts_per_window(self) -> int:
        """Prompts that are sampled with one set of weights."""
        return self.prompts_per_step * max(1, self.sync_every)

    @property
    def prompts_ahead(self) -> int:
        """Most prompts under way at a time: a window's, or those of `max_lag` steps and of the one that trains."""
        return self.prompts_per_step * (self.max_lag + 1) if self.max_lag else self.prompts_per_window

    @property
    def needs_snapshot(self) -> bool:
        """Whether the trainer moves on while rollouts are written, so that an engine needs weights of its own."""
        return self.max_lag > 0 or self.sync_every != 1

    def window_size(self, step: int) -> int:
        """Prompts of the window that begins after `step` steps; 0 once all are done."""
        return min(self.prompts_per_window, max(0, self.steps - step) * self.prompts_per_step)
