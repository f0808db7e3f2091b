"""The trainer with weights sharded over the ranks by FSDP2: each rank holds a part of every weight and its optimizer.

A layer's weights are gathered for its computation and released after it; gradients are reduced and sharded. The
checkpoint is that of `single`, whole tensors by name, so a run can continue with another number of ranks.
"""

import types
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from podium.errors import InputError
from podium.model.forward import PlacedBatch, policy_logprobs
from podium.trainer.single import Single


class Fsdp(Single):
    is_sharded = True
    passes_communicate = True

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
        # Our function calls the decoder and the head; as a method of the root it gathers the weights that it needs.
        model.policy_logprobs = types.MethodType(policy_logprobs, model)
        register_fsdp_forward_method(model, "policy_logprobs")

    def _logprobs(self, placed: PlacedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        model: Any = self._model
        made = model.policy_logprobs(placed, self._compute_dtype)
        if not torch.is_grad_enabled():
            model.reshard()  # the root keeps its weights whole for a backward pass, which does not follow here
        return made

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _part_for(self, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if not isinstance(parameter, DTensor):
            return super()._part_for(parameter, whole)
        # Every rank has the whole tensor and takes its own part. If rank 0 sent the parts instead, ranks that load
        # their tensors in different orders would receive wrong ones.
        whole = whole.to(parameter.device)
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        return part.clone()  # otherwise the part would keep the memory of the whole
