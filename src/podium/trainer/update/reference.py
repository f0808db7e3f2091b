"""The reference policy of a KL term.

With LoRA it is the policy with its adapter disabled, without any copy. Otherwise, or if the reference follows the
policy, it is a copy of the trained parameters, swapped in for a forward pass. Following means
ref = (1 − alpha)·ref + alpha·policy every `every` steps.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from podium.model.forward import PlacedBatch


class ReferencePolicy:
    """`logprobs_of` computes the policy's logprobs; `peft` is its PEFT model, or None for full weights."""

    def __init__(
        self,
        logprobs_of: Callable[[PlacedBatch], torch.Tensor],
        peft: Any,
        parameters: Mapping[str, torch.nn.Parameter],
        alpha: float = 0.0,
        every: int = 1,
    ) -> None:
        self._logprobs_of, self._peft, self._parameters = logprobs_of, peft, parameters
        self._alpha, self._every = alpha, every
        needs_copy = peft is None or alpha > 0
        self._copy = {name: p.detach().clone() for name, p in parameters.items()} if needs_copy else {}

    @torch.no_grad()
    def logprobs(self, placed: PlacedBatch) -> torch.Tensor:
        """`[T]` at the batch's temperature."""
        with self._in_place():
            return self._logprobs_of(placed)

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Moves the reference towards the policy, after a step, counted from 1."""
        if self._alpha and step % self._every == 0:
            for name, tensor in self._copy.items():
                tensor.lerp_(self._parameters[name].detach(), self._alpha)

    def state(self) -> dict[str, torch.Tensor]:
        """Empty if the reference can be rebuilt from the model alone."""
        return {f"reference.{name}": tensor for name, tensor in self._copy.items()} if self._alpha else {}

    @torch.no_grad()
    def load_state(
        self,
        tensors: Mapping[str, torch.Tensor],
        part_for: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        if self._alpha:
            for name, tensor in self._copy.items():
                tensor.copy_(part_for(tensor, tensors[f"reference.{name}"]))

    @contextlib.contextmanager
    def _in_place(self) -> Iterator[None]:
        if not self._copy:
            with self._peft.disable_adapter():
                yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            if isinstance(parameter, DTensor):  # a sharded parameter keeps its memory, so values are exchanged
                mine, other = parameter.to_local(), self._copy[name].to_local()  # type: ignore[attr-defined]
                kept = mine.clone()
                mine.copy_(other)
                other.copy_(kept)
            else:
                parameter.data, self._copy[name] = self._copy[name], parameter.data
