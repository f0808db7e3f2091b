"""Logprobs of one text, asked for after every push: its pass through the model, replayed as a CUDA graph.

A plain pass over a short text takes as long as the host needs to start its kernels, tens of milliseconds. The graph
reads the weights where they lie, as captured decode steps do, so it tells what they sample from.
"""

import warnings
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from podium.model.device_thread import SHARED
from podium.model.forward import PlacedBatch, batch_of, place, policy_logprobs, sequence_logprobs


class ReplayedScore:
    """A text is scored plainly the first time, captured the second time, and replayed until another comes."""

    def __init__(self, model: PreTrainedModel, compute_dtype: torch.dtype | None) -> None:
        self._model, self._compute_dtype = model, compute_dtype
        self._token_ids: list[int] = []
        self._captured: tuple[torch.cuda.CUDAGraph, PlacedBatch, torch.Tensor] | None = None
        """The pass as a graph, the batch that it reads, and the logprobs that it writes."""
        self._can_capture = True

    def __call__(self, token_ids: Sequence[int]) -> list[float]:
        if self._token_ids != list(token_ids) or not self._can_capture:
            self._token_ids, self._captured = list(token_ids), None
            return sequence_logprobs(self._model, self._token_ids, compute_dtype=self._compute_dtype)
        if self._captured is None:
            try:
                self._captured = self._capture()
            except Exception as error:  # whatever another architecture's modules raise
                warnings.warn(f"engine.name = 'inprocess' scores the probe without CUDA graphs: {error}", stacklevel=2)
                self._can_capture = False
                return self(token_ids)
        graph, _, logprobs = self._captured
        graph.replay()
        return logprobs.tolist()

    @torch.no_grad()
    def _capture(self) -> tuple[torch.cuda.CUDAGraph, PlacedBatch, torch.Tensor]:
        """No training meanwhile, as for a decode step."""
        placed, graph = place(batch_of(self._token_ids), self._model.device), torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        with SHARED.busy, torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logprobs = policy_logprobs(self._model, placed, self._compute_dtype)[0]
            logprobs = logprobs.index_select(0, placed.row.loss_places)
        return graph, placed, logprobs
