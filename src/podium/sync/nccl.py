"""Sync from GPU to GPU, for an engine in another process: vLLM's own weight transfer over NCCL.

For full weights and an engine with its own GPUs. `engine.join_transfer(init_info)` connects the engine to the trainer
once. At each push, `engine.receive_weights(update_info, version)` receives what the trainer broadcasts at the same
time. Both calls go to the engine's process (`POST /join_transfer` and `POST /receive_weights` of a server) and carry
names and shapes; the tensors go from GPU to GPU. `traits.transfer_ranks` is the engine's number of GPUs. The parity
check follows each push.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Annotated, Any

import torch
from pydantic import Field

from podium.errors import EngineError, InputError, PodiumError
from podium.model.handoff import in_saved_format
from podium.sync import Channel, Delivery


class Nccl(Channel):
    def __init__(
        self,
        delivery: Delivery,
        *,
        address: Annotated[str, Field(description="address of this machine, as the engine sees it")] = "127.0.0.1",
        port: Annotated[int, Field(ge=0, le=65535, description="port for the connection; 0: any free one")] = 0,
        timeout_s: Annotated[float, Field(gt=0, description="limit for the engine to join, and for a push")] = 300.0,
    ) -> None:
        check_devices(delivery)
        super().__init__(delivery)
        self._address, self._port, self._timeout_s = address, port, timeout_s
        self._group: Any = None

    async def _carry(self, version: int) -> None:
        engine: Any = self._delivery.engine
        if engine.traits.outlives_run:
            await engine.claim(self._delivery.run_id, "run")
        saved = in_saved_format(self._delivery.policy.model, self._delivery.trainer.weights())
        weights = [(name, tensor.detach().contiguous()) for name, tensor in saved]
        if self._group is None:
            port = self._port or free_port(self._address)
            meeting = {
                "master_address": self._address,
                "master_port": port,
                "world_size": 1 + engine.traits.transfer_ranks,
            }
            opened = in_daemon(open_group, meeting, weights[0][1].device)
            _, self._group = await self._both(engine.join_transfer({**meeting, "rank_offset": 1}), opened)
        sent = in_daemon(broadcast, self._group, [tensor for _, tensor in weights])
        await self._both(engine.receive_weights(update_info(weights), version), sent)

    async def _both(self, theirs: Any, ours: Any) -> Any:
        """Runs both sides of a transfer. Each waits for the other, so a side that fails must not block this one."""
        try:
            return await asyncio.wait_for(asyncio.gather(theirs, ours), self._timeout_s)
        except PodiumError:
            raise
        except Exception as error:
            name = type(self._delivery.engine).__name__
            raise EngineError(
                f"sync.name = 'nccl': {name} and the trainer did not finish a transfer within sync.timeout_s = "
                f"{self._timeout_s:g} ({type(error).__name__}: {error}); the engine may have exited, or NCCL finds no "
                "connection: it cannot connect two processes on one GPU"
            ) from error


def in_daemon(function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
    """Runs the function on a daemon thread, which a run can leave: a broadcast without a receiver never returns."""
    done: Future[Any] = Future()
    done.set_running_or_notify_cancel()  # from now on nobody else can settle it

    def run() -> None:
        try:
            done.set_result(function(*arguments))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True, name="nccl").start()
    return asyncio.wrap_future(done)


def check_devices(delivery: Delivery) -> None:
    """Raises `InputError` if NCCL cannot transfer these weights or cannot reach the engine."""
    if delivery.policy.peft is not None:
        raise InputError("sync.name = 'nccl' is for full weights; an adapter is small: use sync.name = 'adapter'")
    engine: Any = delivery.engine
    if not engine.traits.transfer_ranks:
        raise InputError(
            f"sync.name = 'nccl' does not reach {type(delivery.engine).__name__}: it is for vLLM with full weights on "
            "its own GPUs, in another process; valid: auto"
        )
    if delivery.policy.device.type != "cuda":
        raise InputError("sync.name = 'nccl' sends weights between GPUs, but the policy is on a CPU; valid: disk")


def update_info(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """What vLLM's workers need before the tensors arrive: names, dtypes and shapes, in the order of the broadcasts."""
    listed = list(weights)
    return {
        "names": [name for name, _ in listed],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in listed],
        "shapes": [list(tensor.shape) for _, tensor in listed],
    }


def open_group(meeting: dict[str, Any], device: torch.device) -> Any:
    """The trainer's side of the group, rank 0; vLLM's workers have the ranks after it."""
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
    from vllm.distributed.utils import StatelessProcessGroup

    place = StatelessProcessGroup.create(
        host=meeting["master_address"], port=meeting["master_port"], rank=0, world_size=meeting["world_size"]
    )
    return PyNcclCommunicator(place, device=device)


def broadcast(group: Any, tensors: Sequence[torch.Tensor]) -> None:
    """One broadcast per tensor, in order; returns when all have been sent."""
    for tensor in tensors:
        with torch.cuda.device_of(tensor):
            group.broadcast(tensor, src=0)
    if torch.cuda.is_available():
        torch.cuda.synchronize(tensors[-1].device)


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]
