"""The trainer with its weights spread over the ranks: FSDP2, each rank holds a part of every weight and its optimizer.

A layer's weights are gathered when the layer is reached and let go after it; gradients come back summed and cut. The
checkpoint is the one of `single`, whole tensors by name, so a run goes on with another number of ranks, or with one.
"""

import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from podium.errors import InputError
from podium.model.forward import Placed, policy_logprobs
from podium.model.handoff import save_gathered
from podium.trainer.single import Single


class Fsdp(Single):
    is_sharded = True
    can_cut = False

    def _spread_weights(self) -> None:
        if not dist.is_initialized():
            raise InputError("trainer.name = 'fsdp' is for several ranks; set runtime.ranks, or use 'single'")
        model: Any = self._model
        if dist.get_rank():
            self._policy.separate_twin(keep=False)  # rank 0's engine samples
        for layers in model.get_decoder().children():
            if isinstance(layers, torch.nn.ModuleList):
                for layer in layers:
                    fully_shard(layer)
        fully_shard(model)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(1.0)  # a batch's loss is its share of the step: shares add up
                module.set_force_sum_reduction_for_comms(True)
        # The decoder and the head are called by a function of ours; as a method of the root it gathers what is due.
        model.policy_logprobs = types.MethodType(policy_logprobs, model)
        register_fsdp_forward_method(model, "policy_logprobs")

    def _logprobs(self, placed: Placed) -> tuple[torch.Tensor, torch.Tensor]:
        model: Any = self._model
        made = model.policy_logprobs(placed, self._compute_dtype)
        if not torch.is_grad_enabled():
            model.reshard()  # the root keeps its weights whole for the backward pass, and here none comes
        return made

    def save_model(self, folder: str) -> None:
        save_gathered(Path(folder), self._policy, self.weights())

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _part_for(self, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return super()._part_for(parameter, whole)
        # Every rank has the whole tensor and cuts its own part. If rank 0 sent the parts instead, ranks that load
        # their tensors in different orders would get each other's.
        whole = whole.to(parameter.device)
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return part.clone()  # or a part would keep the memory of the whole

    def _sum_gradients(self) -> None:
        """Done in the backward pass."""
