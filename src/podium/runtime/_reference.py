"""The reference in a process of its own, so that it need not fit beside the policy.

    batches ──► Referenced.step ──► the process: the model as it was, never stepped
                     │      ◄────── logprobs [T]
                     └──► trainer.step, whose batches now carry them

The process computes with the trainer's own forward pass, so the logprobs are those of a reference beside the policy. It
ends when the line to it closes: with the run, or with whoever was killed.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from podium.errors import InputError, ReferenceLostError
from podium.processes import how_it_ended
from podium.records import Batch, UpdateResult
from podium.runtime import _wire as wire
from podium.runtime._around import Around
from podium.sections import SeparateReference
from podium.settings import Settings

START_S = 600.0
"""For its model to be loaded."""
ANSWER_S = 1800.0
"""For one batch."""
LOOK_S = 1.0
CLOSE_S = 10.0
LOGPROBS, TROUBLE = b"L", b"!"
"""What an answer begins with."""


class ReferenceProcess:
    """Started and ready once it is made."""

    def __init__(self, model: dict[str, Any], device: str, precision: str, seed: int) -> None:
        mine, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "podium.runtime._reference_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,
                pass_fds=[theirs.fileno()],
                env=_environment(device),
                start_new_session=True,  # a signal from the keyboard is for the driver alone
            )
        self.pid = self._process.pid
        self._line = Connection(mine.detach())
        given = {"model": model | {"device": device.partition(":")[0]}, "precision": precision, "seed": seed}
        try:
            self._ask(json.dumps(given).encode(), START_S)
        except BaseException:
            self.close()
            raise

    def logprobs(self, batch: Batch) -> torch.Tensor:
        """`[T]` at the batch's temperature."""
        content = self._ask(wire.batches_to_bytes([batch]), ANSWER_S)
        return wire.tensors_from_bytes(content)["logprobs"]

    def close(self) -> None:
        """It ends when the line closes; one that does not is killed."""
        self._line.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=CLOSE_S)
        self._process.kill()
        self._process.wait()

    def _ask(self, content: bytes, limit_s: float) -> bytes:
        try:
            self._line.send_bytes(content)
            deadline = time.monotonic() + limit_s
            while not self._line.poll(LOOK_S):
                if time.monotonic() > deadline:
                    raise ReferenceLostError(f"the process of the reference gave no answer within {limit_s:g} s")
            answer = self._line.recv_bytes()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=CLOSE_S)
            raise ReferenceLostError(
                f"the reference is lost: {how_it_ended(self._process.poll())}; its last words are above. The run can "
                "be resumed from its last commit"
            ) from None
        if answer.startswith(TROUBLE):
            raise ReferenceLostError(f"the process of the reference failed: {answer[1:].decode()}")
        return answer[1:]


class Reference(Protocol):
    def logprobs(self, batch: Batch) -> torch.Tensor: ...


class Referenced(Around):
    """A trainer whose batches are handed to it with the reference's logprobs."""

    def __init__(self, trainer: Any, reference: Reference) -> None:
        super().__init__(trainer)
        self._reference = reference

    async def step(self, batches: Sequence[Batch]) -> UpdateResult:
        return await self._stage.step(await asyncio.to_thread(self._with_logprobs, batches))

    def _with_logprobs(self, batches: Sequence[Batch]) -> list[Batch]:
        return [replace(batch, reference_logprobs=self._reference.logprobs(batch)) for batch in batches]


def with_reference(trainer: Any, settings: Settings) -> tuple[Any, ReferenceProcess | None]:
    """The trainer with a reference apart, and its process; as it is where it keeps the reference, or there is none."""
    given = settings.model.reference
    if not isinstance(given, SeparateReference):
        return trainer, None
    model, precision, seed = reference_needs(settings)
    reference = ReferenceProcess(model, given.device, precision, seed)
    return Referenced(trainer, reference), reference


def reference_needs(settings: Settings) -> tuple[dict[str, Any], str, int]:
    """The model's table, the precision and the seed of whoever keeps the model as it was."""
    model = settings.model.model_dump(mode="json", exclude={"reference"}, exclude_none=True)
    return model, settings.trainer.options.get("precision", "float32"), settings.run.seed


def check_reference(settings: Settings) -> None:
    """Whether there is such a device here, asked before the model is loaded; a cluster has its own."""
    given = settings.model.reference
    if not isinstance(given, SeparateReference) or given.device == "cpu" or settings.runtime.name != "local":
        return
    number, there = int(given.device.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= there:
        names = ", ".join(["cpu", *(f"cuda:{index}" for index in range(there))])
        raise InputError(f"model.reference.device = {given.device!r}: there is no such device; there are: {names}")


def _environment(device: str) -> dict[str, str]:
    """With one GPU to be seen, the one that is meant."""
    kind, _, number = device.partition(":")
    if kind == "cpu" or not number:
        return dict(os.environ)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return os.environ | {"CUDA_VISIBLE_DEVICES": visible.split(",")[int(number)] if visible else number}
