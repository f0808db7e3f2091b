"""Real parts, each broken in one place. Named in the settings as `tests.broken:NAME`, as user code would be."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from podium.engine.inprocess import Inprocess
from podium.engine.vllm.steps import Served
from podium.engine.vllm_local import VllmLocal
from podium.loss.grpo import grpo
from podium.records import Batch, PolicyLoss
from podium.rollout.single_turn import SingleTurn


class StaleEngine(Inprocess):
    """Takes the first weights and says yes to all later ones."""

    async def load_weights(self, weights, version):
        if self.policy_version is None:
            await super().load_weights(weights, version)
        self.policy_version = version


class AdapterOffEngine(Inprocess):
    """Samples from the base: the adapter is applied with scale 0."""

    async def load_weights(self, weights, version):
        self._scale = 0.0
        await super().load_weights(weights, version)


class OldVersionEngine(Inprocess):
    """Takes the weights and keeps the old version number."""

    async def load_weights(self, weights, version):
        before = self.policy_version
        await super().load_weights(weights, version)
        self.policy_version = version if before is None else before


class StaleVllm(VllmLocal):
    """Takes the first weights and says yes to all later ones."""

    async def load_weights(self, weights, version):
        if self.policy_version is None:
            await super().load_weights(weights, version)
        self.policy_version = version


class AdapterOffVllm(VllmLocal):
    """Loads every adapter and sends requests without it."""

    def _attach(self, folder, version, own_folder=False):
        super()._attach(folder, version, own_folder)
        self._steps.serve(Served(version, self._steps.served.salt))


class OtherTokenizerVllm(VllmLocal):
    """Serves a base model whose ids mean other tokens: each row of the table stands one place further."""

    def __init__(self, policy, snapshot=False, *, eager: bool = False, max_context_tokens: int | None = None):
        folder = Path(tempfile.mkdtemp()) / "model"
        shutil.copytree(policy.source, folder)
        weights = load_file(folder / "model.safetensors")
        name = "model.embed_tokens.weight"
        save_file({**weights, name: weights[name].roll(1, 0).contiguous()}, folder / "model.safetensors")
        other = replace(policy, source=str(folder))
        super().__init__(other, snapshot, eager=eager, max_context_tokens=max_context_tokens)


def own_denominator(policy_logprobs: torch.Tensor, old_logprobs: torch.Tensor, batch: Batch) -> PolicyLoss:
    """Divides by the tokens of the batch at hand, not of the step."""
    right = grpo(policy_logprobs, old_logprobs, batch)
    return replace(right, per_token=right.per_token * batch.num_loss_tokens / batch.loss_mask.sum())


class ReencodingRollout(SingleTurn):
    """Encodes the text again and trains that: the end-of-sequence token is lost."""

    async def start(self, prompts):
        async for group in super().start(prompts):
            yield replace(group, rollouts=tuple(self._again(rollout) for rollout in group.rollouts))

    def _again(self, rollout):
        ids = tuple(self._tokenizer.encode(rollout.text))
        kept = len(ids)
        return replace(
            rollout, token_ids=ids, rollout_logprobs=rollout.rollout_logprobs[:kept], loss_mask=rollout.loss_mask[:kept]
        )


def lying_reward(prompt, rollout):
    return float("nan")


FAULTS = ("never", "nothing", "old", "half scale", "half of the layers", "not merged")
"""What may happen to an adapter on its way into an engine."""


class FaultyEngine(Inprocess):
    """Takes adapters with one fault, from the second push on."""

    fault = "never"

    async def load_weights(self, weights, version):
        self._pushes = getattr(self, "_pushes", 0) + 1
        await super().load_weights(weights, version)

    def _apply_adapter(self, layer, a, b):
        before = self._applied.get(layer)
        if self._pushes < 2 or before is None:
            super()._apply_adapter(layer, a, b)
            return
        if self.fault == "nothing":
            super()._apply_adapter(layer, a, torch.zeros_like(b))
        elif self.fault == "old":
            super()._apply_adapter(layer, *before)
        elif self.fault == "half scale":
            self._scale, right = self._scale / 2, self._scale
            super()._apply_adapter(layer, a, b)
            self._scale = right
        elif self.fault == "half of the layers" and ".0." in layer:
            super()._apply_adapter(layer, a, b)
        elif self.fault == "not merged":
            module = self._model.get_submodule(layer)
            kept = module.weight.detach().clone() if not hasattr(module, "_packed") else module._packed
            super()._apply_adapter(layer, a, b)
            if hasattr(module, "_packed"):
                module._packed = kept
            else:
                module.weight.copy_(kept)


def faulty(fault: str) -> type[FaultyEngine]:
    return type("FaultyEngine", (FaultyEngine,), {"fault": fault, "__init__": Inprocess.__init__})


Never, Nothing, Old, HalfScale, HalfOfTheLayers, NotMerged = map(faulty, FAULTS)
