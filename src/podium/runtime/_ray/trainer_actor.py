"""The trainer in a process of its own; with several ranks, one actor each, which torch.distributed joins."""

import asyncio
import os
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from podium.model.device_thread import on_device_thread
from podium.model.evidence import Held, difference
from podium.model.fingerprint import tokenizer_fingerprint
from podium.model.handoff import Crate, pack_published, publish, read_files
from podium.model.load import Policy, load_policy
from podium.records import UpdateResult
from podium.runtime import _wire as bytes_of
from podium.runtime._build import check_trainer, make_trainer
from podium.runtime._keep import load_start
from podium.runtime._launch import START_LIMIT
from podium.runtime._memory import MemoryPlan, memory_plan
from podium.runtime._ranks import RankedTrainer, follow, join
from podium.runtime._ray.tenant import Place, Tenant
from podium.settings import Settings
from podium.sync._guard import check_finite
from podium.sync.nccl import free_port


@dataclass(frozen=True)
class About:
    """What the driver needs to know of the policy."""

    pid: int
    node: str
    stop_ids: tuple[int, ...]
    max_context_tokens: int
    vocabulary: int
    tokenizer: Mapping[str, Any]
    """Its fingerprint."""
    base_digest: str | None
    """Of the weights under the adapter; of rank 0 alone, with which the others are compared."""


class TrainerActor(Tenant):
    def __init__(self, place: Place, settings: Mapping[str, Any], ranks: int, rank: int) -> None:
        super().__init__(place)
        self._settings, self._rank, self._ranks = Settings.from_dict(settings), rank, ranks
        self._policy: Policy | None = None
        self._trainer: Any = None

    async def meeting_place(self) -> tuple[str, int]:
        """Where the ranks meet: at rank 0's machine."""
        from ray.util import get_node_ip_address

        return get_node_ip_address(), free_port(get_node_ip_address())

    async def load(self, meet_at: tuple[str, int] | None = None) -> About:
        if meet_at is not None:
            await asyncio.to_thread(self._join, *meet_at)
        return await asyncio.to_thread(self._load)

    async def build(self, steps: int, longest_prompt: int) -> MemoryPlan:
        """`steps`: of the run; `longest_prompt`: of its data."""
        return await asyncio.to_thread(self._build, steps, longest_prompt)

    async def follow(self) -> None:
        """What every rank but 0 does from then on. One that fails ends its process, so that its fellows learn of it."""
        try:
            await asyncio.to_thread(follow, join(), self._trainer, None)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    async def step(self, batches: bytes) -> UpdateResult:
        return await self._trainer.step(bytes_of.batches_from_bytes(batches))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await self._trainer.score(token_ids)

    async def difference(self, held: Held) -> str | None:
        """What of a worker's weights is not the trainer's."""
        assert self._policy is not None
        scale = None if self._policy.peft is None else self._policy.adapter_scale
        return await on_device_thread(difference, self._trainer.weights(), held, scale)

    async def publish(self, version: int) -> tuple[str, Crate]:
        """The hash of the weights, for whoever passes the crate on unopened. Those that are no numbers are not given
        away."""
        when = f"before the push of policy version {version}"
        await on_device_thread(check_finite, self._trainer.weights(), when)
        crate = await asyncio.to_thread(self._publish, version)
        return crate.sha256, crate

    async def state(self) -> np.ndarray:
        return await asyncio.to_thread(lambda: as_array(bytes_of.tensors_to_bytes(self._trainer.state())))

    async def load_state(self, tensors: np.ndarray) -> None:
        await asyncio.to_thread(self._trainer.load_state, bytes_of.tensors_from_bytes(tensors.tobytes()))

    async def load_weights(self, tensors: np.ndarray) -> None:
        await asyncio.to_thread(self._trainer.load_weights, bytes_of.tensors_from_bytes(tensors.tobytes()))

    async def load_start(self) -> None:
        assert self._policy is not None
        await asyncio.to_thread(load_start, self._settings, self._policy, self._trainer)

    async def save_model(self) -> dict[str, np.ndarray]:
        def save() -> dict[str, np.ndarray]:
            with tempfile.TemporaryDirectory(prefix="podium-model-") as folder:
                self._trainer.save_model(folder)
                return read_files(Path(folder))

        return await asyncio.to_thread(save)

    def _join(self, address: str, port: int) -> None:
        import torch.distributed as dist

        ranks = {"RANK": self._rank, "WORLD_SIZE": self._ranks, "LOCAL_RANK": 0, "MASTER_PORT": port}
        os.environ |= {key: str(value) for key, value in ranks.items()} | {"MASTER_ADDR": address}
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, timeout=START_LIMIT)

    def _load(self) -> About:
        check_trainer(self._settings)
        policy = self._policy = load_policy(self._settings.model, seed=self._settings.run.seed)
        fingerprint = tokenizer_fingerprint(policy.tokenizer)
        base_digest = policy.base_digest() if self._rank == 0 else None
        facts = (policy.stop_ids, policy.max_context_tokens, policy.vocabulary, fingerprint, base_digest)
        return About(os.getpid(), os.uname().nodename, *facts)

    def _build(self, steps: int, longest_prompt: int) -> MemoryPlan:
        assert self._policy is not None
        memory = memory_plan(self._settings, self._policy, longest_prompt)
        plan = replace(self._settings.plan, steps=steps)
        line = join() if self._ranks > 1 else None  # all ranks take their place at the same time
        if line is not None:
            line.note_loaded(self._policy)
        trainer = make_trainer(self._settings, self._policy, plan, memory)
        self._trainer = trainer if line is None or self._rank else RankedTrainer(trainer, line)
        return memory

    def _publish(self, version: int) -> Crate:
        assert self._policy is not None
        with tempfile.TemporaryDirectory(prefix="podium-weights-") as root:
            return pack_published(publish(Path(root), self._policy, self._trainer.weights(), version))


def as_array(content: bytes) -> np.ndarray:
    """Bytes as an object store takes them without another copy."""
    return np.frombuffer(content, dtype=np.uint8)
