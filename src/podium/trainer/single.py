"""The reference trainer: one device per process, LoRA or full weights, all parameters on every rank.

In: the batches of a step. Out: what the update did. The trainer does not know the algorithm: advantages come with the
tokens, and the loss is passed in. A loss or gradient that is not finite does not change the weights and is counted.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from pydantic import Field

from podium.errors import TooLargeError
from podium.model.device_thread import on_device_thread, random_state, set_random_state
from podium.model.evidence import named_trained
from podium.model.forward import PlacedBatch, batch_of, head_weight, place, policy_logprobs, products_dtype
from podium.model.fused import compile_layers, is_compiled
from podium.model.handoff import save_gathered
from podium.model.load import Policy, refuse_other_weights
from podium.records import Batch, ReferenceSettings, UpdateResult
from podium.stages import Loss
from podium.trainer import (
    OptimizerName,
    ReferencePolicy,
    Schedule,
    check_ids,
    check_shared_prefix,
    halved,
    load_optimizer_state,
    logprobs_by_rollout,
    make_optimizer,
    metric_shares,
    metrics_over_ranks,
    on_any_rank,
    optimizer_state,
    rate_at,
    refuse_split_gap,
    split_gap,
    sum_gradients,
    sum_over_ranks,
    together,
)

OF_OLD_POLICY = ("mismatch/abs_mean", "mismatch/k1", "mismatch/k3", "mismatch/outside_share")
"""Metrics that compare the sampler with the policy before the first update of a step."""
Beta = Annotated[float, Field(ge=0, lt=1)]
T = TypeVar("T")
NOT_AGAIN = (
    "a batch does not fit into memory, and a trainer that shards weights or gradients over ranks cannot repeat a pass: "
    "lower pack.max_tokens_per_batch or set trainer.gradient_checkpointing = true"
)


class Single:
    """`total_steps` is the run's length, over which the learning rate decays."""

    is_sharded: ClassVar[bool] = False
    """Whether a rank holds only a part of each weight; an engine then needs its own copy."""
    passes_communicate: ClassVar[bool] = False
    """Whether ranks gather weights or reduce gradients inside a pass. If one rank fails there, the others wait inside
    their pass and would mistake its report for an answer. So its error is raised directly and ends its process, and a
    pass that ran out of memory cannot start again with smaller batches."""

    def __init__(
        self,
        policy: Policy,
        loss: Loss,
        total_steps: int = 1,
        reference: ReferenceSettings | None = None,
        shared_prefix: bool = False,
        compile: bool | None = None,
        *,
        lr: Annotated[
            float | None, Field(gt=0, description="learning rate; default: 1e-5 with LoRA, 1e-6 for full weights")
        ] = None,
        schedule: Annotated[Schedule, Field(description="learning-rate schedule after the warm-up")] = "constant",
        warmup_steps: Annotated[int, Field(ge=0, description="steps over which the learning rate rises to lr")] = 0,
        optimizer: Annotated[
            OptimizerName, Field(description="adamw_8bit keeps a quarter of the state; it needs bitsandbytes")
        ] = "adamw",
        betas: Annotated[tuple[Beta, Beta], Field(description="AdamW's decay rates of the two moments")] = (0.9, 0.999),
        weight_decay: Annotated[float, Field(ge=0, description="AdamW's decoupled weight decay")] = 0.0,
        max_grad_norm: Annotated[float, Field(gt=0, description="larger gradients are clipped to this norm")] = 1.0,
        epochs_per_batch: Annotated[int, Field(ge=1, description="passes over the rollouts of a step")] = 1,
        minibatches_per_step: Annotated[int, Field(ge=1, description="updates per pass")] = 1,
        precision: Annotated[
            Literal["float32", "bfloat16"] | None,
            Field(
                description="precision of matrix products; adapter, logits, loss and optimizer are not affected; "
                "default: bfloat16 with weights in bfloat16, else float32"
            ),
        ] = None,
        gradient_checkpointing: Annotated[
            bool | None,
            Field(description="less memory, about a third more time; default: only if batches would not fit otherwise"),
        ] = None,
    ) -> None:
        assert lr is not None, "the settings resolve it"
        self._policy, self._model, self._loss = policy, policy.model, loss
        self._spread_weights()
        self._max_grad_norm, self._epochs = max_grad_norm, epochs_per_batch
        self._has_several_updates = epochs_per_batch * minibatches_per_step > 1
        self._rate = partial(rate_at, lr, warmup_steps=warmup_steps, total_steps=total_steps, schedule=schedule)
        self._parameters = policy.trained_parameters()
        self._optimizer: Any = make_optimizer(
            self._parameters, optimizer, lr=lr, betas=betas, weight_decay=weight_decay
        )
        self._compute_dtype = products_dtype(precision, policy.model.dtype)
        self._reference = (
            None
            if reference is None
            else ReferencePolicy(self._snapshot, policy.peft, self._parameters, **asdict(reference))
        )
        self._shared_prefix = shared_prefix
        self._is_prefix_checked = not shared_prefix
        self._num_steps = 0
        """Steps that made at least one update."""
        self._halvings = 0
        """How often batches are halved because they did not fit into memory; it affects the order of float sums."""
        if gradient_checkpointing:
            self._model.gradient_checkpointing_enable({"use_reentrant": False})
            self._model.enable_input_require_grads()
        if is_compiled(self._model) if compile is None else compile:
            compile_layers(self._model)

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        return await on_device_thread(self._step, batches)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await on_device_thread(self._score, list(token_ids))

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._whole(parameter.detach())) for name, parameter in named_trained(self._model))

    def state(self) -> dict[str, torch.Tensor]:
        tensors = self._trained_state()
        tensors |= self._reference.state() if self._reference else {}
        tensors |= random_state()
        tensors |= {"num_steps": torch.tensor(self._num_steps), "halvings": torch.tensor(self._halvings)}
        return {name: self._whole(t.detach()).to("cpu", copy=True).contiguous() for name, t in tensors.items()}

    def load_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads only the weights of a state, which must be those that this model trains."""
        refuse_other_weights(tensors, {name: self._shape(parameter) for name, parameter in self._parameters.items()})
        self._put_weights(tensors)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.load_weights(tensors)
        self._put_optimizer_state(tensors)
        if self._reference:
            self._reference.load_state(tensors, self._part_for)
        self._num_steps = int(tensors["num_steps"])
        self._halvings = int(tensors.get("halvings", 0))  # older checkpoints do not have it
        set_random_state(tensors)

    def save_model(self, folder: str) -> None:
        if self.passes_communicate:
            save_gathered(Path(folder), self._policy, self.weights())
        elif self._policy.peft is not None:
            self._policy.peft.save_pretrained(folder)
            (Path(folder) / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        else:
            self._model.save_pretrained(folder)
            self._policy.tokenizer.save_pretrained(folder)

    def _trained_state(self) -> dict[str, torch.Tensor]:
        """The trained weights and the optimizer's state, by name."""
        weights = {f"weights.{name}": parameter for name, parameter in self._parameters.items()}
        return weights | dict(optimizer_state(self._optimizer, self._parameters))

    @torch.no_grad()
    def _put_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._part_for(parameter, tensors[f"weights.{name}"]))

    def _put_optimizer_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        load_optimizer_state(self._optimizer, self._parameters, tensors, self._part_for)

    def _spread_weights(self) -> None:
        """Shards the weights before the optimizer is made; this trainer keeps them whole on every rank."""

    def _whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor of which this rank may hold a part; every rank must call it."""
        return tensor

    def _shape(self, parameter: torch.Tensor) -> torch.Size:
        """The shape of the whole parameter."""
        return parameter.shape

    def _part_for(self, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """The part of a whole tensor that this rank holds, given its parameter."""
        return whole.to(parameter.device)

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """`is_last`: this is the last batch of the update."""
        loss.backward()

    def _clip_gradients(self) -> float:
        """Clips the gradient and returns its norm before clipping."""
        return float(self._whole(torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._max_grad_norm)))

    def _apply_gradients(self, is_finite: bool) -> None:
        """Makes the optimizer's step, or none if the gradient is not finite."""
        if is_finite:
            self._optimizer.step()

    def _step(self, batches: Sequence[Batch]) -> UpdateResult:
        if not batches:
            return UpdateResult(updated=False, num_loss_tokens=0, metrics={"optim/skipped": 1.0})
        lr = self._rate(self._num_steps)
        self._optimizer.param_groups[0]["lr"] = lr
        prepared = self._prepare(batches)
        parts = [list(part) for _, part in groupby(prepared, key=lambda placed: placed.batch.minibatch)]
        # Passes of the old policy: the whole first epoch if its logprobs were saved, else only the first update.
        by_old_policy = len(parts) if prepared[0].batch.old_logprobs is not None else 1
        first_passes: list[tuple[Batch, torch.Tensor]] = []
        updates = [
            self._update(part, first_passes if number < by_old_policy else [])
            for number, part in enumerate(parts * self._epochs)
        ]
        is_updated = any(not update["optim/skipped"] for update in updates)
        self._num_steps += is_updated
        if is_updated and self._reference:
            self._reference.follow(self._num_steps)
        return UpdateResult(
            updated=is_updated,
            num_loss_tokens=sum(part[0].batch.num_loss_tokens for part in parts),
            metrics={
                name: fmean(update[name] for update in (updates[:by_old_policy] if name in OF_OLD_POLICY else updates))
                for name in updates[0]
            }
            | {
                "optim/lr": lr,
                "optim/updates": float(sum(1 - update["optim/skipped"] for update in updates)),
                **self._pack_metrics(prepared),
            },
            policy_logprobs=logprobs_by_rollout(first_passes),
        )

    def _pack_metrics(self, prepared: Sequence[PlacedBatch]) -> dict[str, float]:
        """Sums over all ranks; an empty batch, which only keeps a rank in step, does not count."""
        trained = [placed for placed in prepared if len(placed.row.loss_places)]
        passes = sum(len(halved(placed.batch, self._halvings)) for placed in trained)
        tokens = sum(len(placed.row.token_ids) for placed in trained)
        counts = sum_over_ranks(torch.tensor([passes, tokens], device=self._policy.device))
        return dict(zip(("pack/batches", "pack/tokens"), map(float, counts.tolist()), strict=True))

    def _place(self, batch: Batch) -> PlacedBatch:
        return place(batch, self._policy.device, shared_prefix=self._shared_prefix)

    def _prepare(self, batches: Sequence[Batch]) -> list[PlacedBatch]:
        """Checks the batches, and computes what must not change after the first update: old logprobs, reference
        logprobs, advantages."""
        together(partial(self._check, batches), self._policy.device)
        placed = self._pass_together(partial(self._placed, batches))
        made = self._loss.prepare([each.batch for each in placed], sum_over_ranks)
        return [replace(each, batch=batch) for each, batch in zip(placed, made, strict=True)]

    def _pass_together(self, function: Callable[[], T]) -> T:
        """Calls a function with passes on every rank; an error on one rank stops all."""
        return function() if self.passes_communicate else together(function, self._policy.device)

    def _check(self, batches: Sequence[Batch]) -> None:
        """The check of shared prefixes does not communicate: trainers whose passes do have no shared prefixes."""
        for batch in batches:
            check_ids(batch)
            self._is_prefix_checked = self._is_prefix_checked or self._check_prefix(batch)

    def _check_prefix(self, batch: Batch) -> bool:
        """Whether the batch has two answers to one prompt, on which it then checks shared prefixes.

        Rounding in bfloat16 hides small errors, so the small float32 copy of the model is checked first.
        """
        siblings = (n for n in range(1, batch.num_documents) if batch.ordinals[n] == batch.ordinals[n - 1])
        second = next(siblings, None)
        if second is None:
            return False
        pair = batch.documents(second - 1, second + 1)
        if (small := self._policy.small) is not None:  # its vocabulary is small too
            of_small = replace(pair, token_ids=pair.token_ids % head_weight(small).shape[0])
            check_shared_prefix(lambda placed: policy_logprobs(small, placed)[0], of_small, small.device, small.dtype)
        dtype = self._compute_dtype or self._model.dtype
        check_shared_prefix(self._snapshot, pair, self._policy.device, dtype)
        return True

    def _placed(self, batches: Sequence[Batch]) -> list[PlacedBatch]:
        placed = []
        takes_snapshot = self._has_several_updates and self._loss.takes_snapshot
        for batch in batches:
            needs_pass = takes_snapshot or self._reference is not None
            parts = [self._place(part) for part in halved(batch, self._halvings)] if needs_pass else []
            frozen: dict[str, torch.Tensor] = {}
            if takes_snapshot:
                frozen["old_logprobs"] = torch.cat([self._snapshot(part) for part in parts])
            if self._reference:
                frozen["reference_logprobs"] = torch.cat([self._reference.logprobs(part) for part in parts])
            placed.append(self._place(batch).with_fields(**frozen))
        return placed

    def _logprobs(self, placed: PlacedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return policy_logprobs(self._model, placed, self._compute_dtype)

    def _score(self, token_ids: list[int]) -> list[float]:
        placed = place(batch_of(token_ids), self._policy.device)
        return self._snapshot(placed)[placed.row.loss_places].tolist()

    @torch.no_grad()
    def _snapshot(self, placed: PlacedBatch) -> torch.Tensor:
        """The policy's current logprobs, `[T]`."""
        return self._logprobs(placed)[0]

    def _update(self, batches: Sequence[PlacedBatch], passes: list[tuple[Batch, torch.Tensor]]) -> dict[str, float]:
        """One optimizer step, skipped if the gradient is not finite. Appends the old policy's logprobs to `passes`."""
        self._model.train()
        metrics = self._gradients(batches, passes)
        self._model.eval()
        norm = self._clip_gradients()
        is_finite = math.isfinite(norm) and math.isfinite(metrics["loss/total"])
        self._apply_gradients(is_finite)
        return metrics | {"optim/grad_norm": norm, "optim/skipped": float(not is_finite)}

    def _gradients(self, batches: Sequence[PlacedBatch], passes: list[tuple[Batch, torch.Tensor]]) -> dict[str, float]:
        """Computes the update's gradient over all ranks, and its metrics.

        If any rank runs out of memory, all ranks halve all batches once more and start again from a clean gradient. The
        gradient is the same, because shares add up. A single document that does not fit is an error.
        """
        while True:
            parts = batches
            if self._halvings:
                halves = [part for placed in batches for part in halved(placed.batch.to("cpu"), self._halvings)]
                parts = [self._place(part) for part in halves]
            for parameter in self._parameters.values():
                parameter.grad = None
            totals = self._pass_together(partial(self._attempt, parts, passes))
            if not on_any_rank(totals is None, self._policy.device):
                break
            self._halvings += 1
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        assert totals is not None
        if not self.passes_communicate:
            sum_gradients(self._parameters.values())
        return metrics_over_ranks(totals)

    def _attempt(
        self, batches: Sequence[PlacedBatch], passes: list[tuple[Batch, torch.Tensor]]
    ) -> dict[str, torch.Tensor] | None:
        """The metrics' sums over this rank's batches, or None if a batch does not fit into memory and can be halved."""
        try:
            return self._accumulate(batches, passes)
        except torch.OutOfMemoryError as error:
            if self.passes_communicate:
                raise TooLargeError(NOT_AGAIN) from error
            if all(placed.batch.num_documents == 1 for placed in batches):
                raise
            return None

    def _accumulate(
        self, batches: Sequence[PlacedBatch], passes: list[tuple[Batch, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Accumulates these batches' gradient on the parameters and returns their share of each metric.

        Waits for the device only at the end, for the check of the split.
        """
        totals: dict[str, torch.Tensor] = {}
        gap: torch.Tensor | None = None
        for placed in batches:
            batch = placed.batch
            logprobs, entropy = self._logprobs(placed)
            if len(placed.row.loss_places):  # an empty batch has none
                passes.append((batch, logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs))
            if gap is None and batch.num_documents > 1:
                gap = split_gap(self._loss, logprobs, batch)
            output = self._loss(logprobs, batch)
            self._backward(output.loss, placed is batches[-1])
            for name, value in metric_shares(output, logprobs.detach(), entropy, batch).items():
                totals[name] = totals[name] + value if name in totals else value
        if gap is not None:
            refuse_split_gap(gap)
        return totals
