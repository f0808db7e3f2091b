"""What keeps a reference: loads the model as it was and answers batches with its logprobs, until the line closes."""

import json
import sys
from multiprocessing.connection import Connection

import torch

from podium.model.forward import place, policy_logprobs
from podium.model.load import load_policy
from podium.runtime import _wire as wire
from podium.runtime._reference import LOGPROBS, TROUBLE
from podium.sections import Model


def serve(line: Connection) -> None:
    given = json.loads(line.recv_bytes())
    policy = load_policy(Model.model_validate(given["model"]), seed=given["seed"])
    compute_dtype = None if given["precision"] == "float32" else getattr(torch, given["precision"])
    policy.model.eval()
    line.send_bytes(LOGPROBS)
    while True:
        [batch] = wire.batches_from_bytes(line.recv_bytes())
        with torch.no_grad():
            logprobs, _ = policy_logprobs(policy.model, place(batch, policy.device), compute_dtype)
        line.send_bytes(LOGPROBS + wire.tensors_to_bytes({"logprobs": logprobs.cpu()}))


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
