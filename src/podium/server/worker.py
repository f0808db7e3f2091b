"""An engine that is served as `podium serve` does: on a unix socket by a pool's worker, through Ray by an actor.

A pool's workers are forked (remote/fork_server.py). In-process engines on a CPU are loaded before that, once: a worker
starts in milliseconds and the base weights are shared in memory. Other engines are loaded by each worker.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from podium.errors import WeightsError
from podium.model.load import load_policy
from podium.server.served import Maker, Served
from podium.settings.lookup import find
from podium.settings.sections import Model


class PoolWorker:
    """`given` says which model and engine; the engine has so many `threads`; weights are read under `root`."""

    def __init__(self, given: Mapping[str, Any], threads: int, root: str) -> None:
        import podium.server.app  # before a fork, or each worker would have to
        import podium.server.listen  # noqa: F401

        self._name, self._threads, self._root = given["engine"], threads, Path(root)
        self._policy, self._engine = load_engine(given)

    def listen(self, path: bytes, reply: Callable[[bytes], None]) -> None:
        """Serves on a socket at that path until it is killed; replies as soon as requests are taken."""
        from podium.server.app import make_app
        from podium.server.listen import listen, unix_socket

        if not self._engine.traits.plans_threads:
            torch.set_num_threads(self._threads)
        served = make_served(self._policy, self._engine, self._root)
        listener = unix_socket(Path(path.decode()))

        async def started() -> None:
            await served.start()
            listener.listen()
            reply(b"")

        listen(make_app(served, None, self._name, lambda message: None), listener, started)


def load_engine(given: Mapping[str, Any]) -> Any:
    """The policy and its engine, as `model`, `engine`, `options` and `compute_dtype` say."""
    policy = load_policy(Model.model_validate(given["model"]), seed=0)
    make, wiring = find("engine", given["engine"]), {}
    if given["compute_dtype"] and "compute_dtype" in inspect.signature(make).parameters:
        wiring["compute_dtype"] = getattr(torch, given["compute_dtype"])
    return policy, make(policy, False, **wiring, **given["options"])


def make_served(policy: Any, engine: Any, root: Path) -> Any:
    """One engine for weights of one kind, read under `root`."""

    def other_policy(shape: Any) -> Any:
        raise WeightsError("weights of another kind than this pool was made for")

    return Served(Maker(other_policy, lambda: policy, lambda _: engine, one_engine=True), root)
