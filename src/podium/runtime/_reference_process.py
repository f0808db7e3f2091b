"""What keeps a reference: loads the model as it was and answers batches with its logprobs, until the line closes."""

import json
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import torch

from podium.model.forward import place, policy_logprobs
from podium.model.load import load_policy
from podium.runtime import _wire as wire
from podium.runtime._reference import LOGPROBS, TROUBLE
from podium.sections import Model


class Frozen:
    """The model as it was."""

    def __init__(self, model: Mapping[str, Any], precision: str, seed: int) -> None:
        self._policy = load_policy(Model.model_validate(model), seed=seed)
        self._policy.model.eval()
        self._compute_dtype = None if precision == "float32" else getattr(torch, precision)

    @torch.no_grad()
    def answer(self, content: bytes) -> bytes:
        """From one batch to its logprobs."""
        [batch] = wire.batches_from_bytes(content)
        logprobs, _ = policy_logprobs(self._policy.model, place(batch, self._policy.device), self._compute_dtype)
        return wire.tensors_to_bytes({"logprobs": logprobs.cpu()})


def serve(line: Connection) -> None:
    reference = Frozen(**json.loads(line.recv_bytes()))
    line.send_bytes(LOGPROBS)
    while True:
        line.send_bytes(LOGPROBS + reference.answer(line.recv_bytes()))


def main() -> int:
    line = Connection(int(sys.argv[1]))
    try:
        serve(line)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # nobody asks any more
    except Exception as error:
        line.send_bytes(TROUBLE + f"{type(error).__name__}: {error}".encode())
        return 1
    raise AssertionError("unreachable")


if __name__ == "__main__":
    sys.exit(main())
