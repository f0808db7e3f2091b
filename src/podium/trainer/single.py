"""The reference trainer: one process, one device, LoRA or full weights.

In: the batches of a step. Out: what the update did. It is blind to the algorithm: advantages come with the tokens,
the loss is handed to it. A loss or gradient that is not finite leaves the weights untouched and is counted.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from podium.errors import CheckpointError
from podium.model.device_thread import on_device_thread
from podium.model.forward import sequence_logprobs
from podium.model.load import Policy
from podium.model.random_state import random_state, set_random_state
from podium.records import Batch, UpdateResult
from podium.stages import LossFunction
from podium.trainer._optimizer import load_optimizer_state, make_optimizer, optimizer_state, warmed_up
from podium.trainer._step import accumulate_gradients


class Single:
    def __init__(
        self,
        policy: Policy,
        loss: LossFunction,
        *,
        lr: Annotated[
            float | None, Field(gt=0, description="learning rate; by default 1e-5 under LoRA, 1e-6 for full weights")
        ] = None,
        warmup_steps: Annotated[int, Field(ge=0, description="updates over which the rate rises to lr")] = 0,
        betas: Annotated[tuple[float, float], Field(description="AdamW's")] = (0.9, 0.999),
        weight_decay: Annotated[float, Field(ge=0)] = 0.0,
        max_grad_norm: Annotated[float, Field(gt=0, description="larger gradients are scaled down to it")] = 1.0,
    ) -> None:
        assert lr is not None, "resolved by the settings"
        self._policy, self._model, self._loss = policy, policy.model, loss
        self._lr, self._warmup_steps, self._max_grad_norm = lr, warmup_steps, max_grad_norm
        self._parameters = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = make_optimizer(self._parameters, lr=lr, betas=betas, weight_decay=weight_decay)
        self._num_updates = 0

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        return await on_device_thread(self._step, batches)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await on_device_thread(sequence_logprobs, self._model, list(token_ids))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._policy.named_weights()

    def state(self) -> dict[str, torch.Tensor]:
        tensors = {f"weights.{name}": parameter for name, parameter in self._parameters.items()}
        tensors |= dict(optimizer_state(self._optimizer, self._parameters))
        tensors |= random_state() | {"num_updates": torch.tensor(self._num_updates)}
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        saved = {name.removeprefix("weights.") for name in tensors if name.startswith("weights.")}
        if saved != set(self._parameters):
            raise CheckpointError(
                f"the checkpoint holds other weights than this model trains: {saved ^ set(self._parameters)}"
            )
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[f"weights.{name}"])
        load_optimizer_state(self._optimizer, self._parameters, tensors)
        self._num_updates = int(tensors["num_updates"])
        set_random_state(tensors)

    def save_model(self, folder: str) -> None:
        if self._policy.peft is None:
            self._model.save_pretrained(folder)
            self._policy.tokenizer.save_pretrained(folder)
        else:
            self._policy.peft.save_pretrained(folder)
            (Path(folder) / "README.md").unlink(missing_ok=True)  # PEFT's empty model card

    def _step(self, batches: Sequence[Batch]) -> UpdateResult:
        if not batches:
            return UpdateResult(updated=False, num_loss_tokens=0, metrics={"optim/skipped": 1.0})
        lr = warmed_up(self._lr, self._num_updates, self._warmup_steps)
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.zero_grad(set_to_none=True)
        self._model.train()
        metrics = accumulate_gradients(self._model, batches, self._loss)
        self._model.eval()
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._max_grad_norm))
        is_finite = math.isfinite(norm) and math.isfinite(metrics["loss/total"])
        if is_finite:
            self._optimizer.step()
            self._num_updates += 1
        return UpdateResult(
            updated=is_finite,
            num_loss_tokens=batches[0].num_loss_tokens,
            metrics=metrics
            | {
                "optim/lr": lr,
                "optim/grad_norm": norm,
                "optim/skipped": float(not is_finite),
                "pack/batches": float(len(batches)),
                "pack/tokens": float(sum(len(batch.token_ids) for batch in batches)),
            },
        )
