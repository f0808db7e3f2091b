"""The trainer on DeepSpeed's ZeRO: optimizer and gradients are sharded over the ranks (2), or the weights too (3).

DeepSpeed reduces, partitions and steps; loss, batches, checks and the checkpoint are those of `single`. DeepSpeed's own
checkpoint files are pickles and are never written. Whole tensors go into Podium's commit by name, so a run can continue
with another number of ranks.
"""

import inspect
import logging
import math
import os
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from pydantic import Field

from podium.errors import InputError
from podium.model.evidence import named_trained
from podium.model.forward import PlacedBatch, policy_logprobs
from podium.model.load import Policy
from podium.records import ReferenceSettings
from podium.stages import Loss
from podium.trainer import sum_over_ranks
from podium.trainer.single import Single

SLOTS = ("exp_avg", "exp_avg_sq")
BEFORE_FIRST_PASS = {2: -1, 3: 0}
"""DeepSpeed's `micro_step_id` before the first backward pass of a step, by stage: that pass overwrites gradients."""


def _import_deepspeed(device: torch.device) -> Any:
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # it uses deprecated names
    try:
        import deepspeed
    except ImportError as error:
        raise InputError(
            f"trainer.name = 'deepspeed': DeepSpeed cannot be imported ({error}); pip install deepspeed, or use 'fsdp'"
        ) from None
    return deepspeed


class Deepspeed(Single):
    passes_communicate = True
    __signature__: inspect.Signature
    """Names the options of `Single` too, which `**options` receives, for the settings."""

    def __init__(
        self,
        policy: Policy,
        loss: Loss,
        total_steps: int = 1,
        reference: ReferenceSettings | None = None,
        shared_prefix: bool = False,
        *,
        zero: Annotated[
            Literal[2, 3], Field(description="2: optimizer and gradients are sharded over ranks; 3: the weights too")
        ] = 2,
        offload: Annotated[bool, Field(description="keeps the optimizer's state and step on the CPU")] = False,
        **options: Any,
    ) -> None:
        if not dist.is_initialized():
            raise InputError("trainer.name = 'deepspeed' is for several ranks; set runtime.ranks, or use 'single'")
        if options.get("optimizer", "adamw") != "adamw":
            raise InputError("trainer.optimizer must be 'adamw' with trainer.name = 'deepspeed'")
        if reference is not None and (policy.peft is None or reference.alpha):
            raise InputError(
                "model.reference: trainer.name = 'deepspeed' supports only the initial model, with LoRA; use 'fsdp'"
            )
        self._zero, self._offload = zero, offload
        super().__init__(policy, loss, total_steps, reference, shared_prefix, **options)
        self._start()

    @property
    def is_sharded(self) -> bool:  # type: ignore[override]
        return self._zero == 3

    def _start(self) -> None:
        deepspeed = _import_deepspeed(self._policy.device)
        model: Any = self._model
        head = model.get_output_embeddings().weight
        if self._zero == 3:
            self._policy.separate_twin(keep=dist.get_rank() == 0)
        model.forward = types.MethodType(policy_logprobs, model)  # DeepSpeed wraps the forward pass that trains
        self._engine, self._optimizer, _, _ = deepspeed.initialize(
            model=model,
            model_parameters=list(self._parameters.values()),
            optimizer=self._optimizer,
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 1,
                "gradient_clipping": self._max_grad_norm,
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": {
                    "stage": self._zero,
                    **({"offload_optimizer": {"device": "cpu"}} if self._offload else {}),
                },
                "steps_per_print": 1 << 60,
            },
        )
        if self._zero == 3:
            from deepspeed.runtime.zero import register_external_parameter

            register_external_parameter(model, head)  # our function reads it, not the head's own forward pass

    def _logprobs(self, placed: PlacedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self._engine(placed, self._compute_dtype)

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """DeepSpeed averages over ranks, but a batch's loss is its share of the step, so shares must add up."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def _clip_gradients(self) -> float:
        """Returns the norm only: DeepSpeed clips when it steps. Each rank has a part of the gradient."""
        parts = [part for group in self._optimizer.averaged_gradients.values() for part in group or ()]
        if not parts:  # offloaded
            from deepspeed.utils import safe_get_full_grad

            whole: list[Any] = [safe_get_full_grad(parameter) for parameter in self._parameters.values()]
            return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in whole))
        squares = torch.stack([part.double().square().sum() for part in parts]).sum()
        return math.sqrt(float(sum_over_ranks(squares)))

    def _apply_gradients(self, is_finite: bool) -> None:
        if is_finite:
            self._engine.step()
        else:
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Does what DeepSpeed itself does for a skipped step: the next backward pass overwrites every accumulator.

        Otherwise its counter of backward passes would advance, and the next pass would add to the old gradients.
        """
        optimizer = self._optimizer
        optimizer.zero_grad(set_to_none=True)
        for accumulator in ("averaged_gradients", "all_grad_tensors"):
            for group in getattr(optimizer, accumulator, {}):
                getattr(optimizer, accumulator)[group] = None
        optimizer.micro_step_id = BEFORE_FIRST_PASS[self._zero]
        if self._offload:
            optimizer.reset_cpu_buffers()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in named_trained(self._model):
            with self._gathered(parameter):
                yield name, parameter.detach().clone() if self._zero == 3 else parameter.detach()

    def _gathered(self, parameter: torch.nn.Parameter, modifier: int | None = None) -> Any:
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters([parameter], modifier_rank=modifier, enabled=self._zero == 3)

    def _shape(self, parameter: torch.Tensor) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    def _trained_state(self) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        steps = self._step_counts()
        tensors: dict[str, Any] = {}
        for name, parameter in self._parameters.items():
            tensors[f"weights.{name}"] = safe_get_full_fp32_param(parameter)
            if steps:
                tensors |= {f"optimizer.{name}.{s}": safe_get_full_optimizer_state(parameter, s) for s in SLOTS}
                tensors[f"optimizer.{name}.step"] = steps[0].float()
        return tensors

    def _put_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param

        for name, parameter in self._parameters.items():
            whole = tensors[f"weights.{name}"].to(self._policy.device)
            with self._gathered(parameter, modifier=0):
                parameter.data.copy_(whole)
            safe_set_full_fp32_param(parameter, whole)

    def _put_optimizer_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        counts = [value for key, value in tensors.items() if key.startswith("optimizer.") and key.endswith(".step")]
        if counts:
            self._make_room(float(counts[0]))
        for name, parameter in self._parameters.items():
            for slot in SLOTS:
                if (saved := tensors.get(f"optimizer.{name}.{slot}")) is not None:
                    safe_set_full_optimizer_state(parameter, saved.to(self._policy.device), slot)

    def _make_room(self, step: float) -> None:
        """Makes the optimizer's slots, which it would otherwise make at its first step."""
        names = {2: "single_partition_of_fp32_groups", 3: "fp32_partitioned_groups_flat"}
        for flat in getattr(self._optimizer, names[self._zero]):
            self._optimizer.optimizer.state[flat] = {
                "step": torch.tensor(step, device=flat.device),
                **{slot: torch.zeros_like(flat) for slot in SLOTS},
            }
        if self._zero == 2:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _step_counts(self) -> list[torch.Tensor]:
        """The optimizer's step counts, of the flat parameters that DeepSpeed made; none before the first update."""
        return [state["step"] for state in self._optimizer.optimizer.state.values() if "step" in state]


_own = inspect.signature(Deepspeed, eval_str=True)
_inherited = inspect.signature(Single, eval_str=True).parameters.values()
Deepspeed.__signature__ = _own.replace(
    parameters=[
        *(parameter for parameter in _own.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD),
        *(parameter for parameter in _inherited if parameter.kind is parameter.KEYWORD_ONLY),
    ]
)
