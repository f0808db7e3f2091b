"""The keeper of a pool's workers: starts them, buries them, and cleans up when the driver is gone.

A fresh interpreter that the pool's driver starts (engine/_pool/keeper.py). With in-process engines on a CPU it loads
the model once, and every worker is a fork of it: there in a moment, its base weights shared in memory. Other engines
are loaded by the worker itself. Each worker is `podium serve` on a unix socket in the pool's private folder, leads a
process group of its own and dies with the keeper.
"""

import gc
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.processes import adopt_orphans, bury, die_with_parent, kill_strays

DYING_S = 3.0


def main(given: Mapping[str, Any]) -> None:
    keeper = Keeper(given)
    signal.signal(signal.SIGTERM, keeper.end)  # sent by the kernel when the driver dies
    die_with_parent(os.getppid(), by=signal.SIGTERM)
    if os.getppid() != given["driver"]:
        keeper.end()
    adopt_orphans()
    try:
        keeper.prepare()
    except BaseException as error:
        keeper.answer({"error": f"{type(error).__name__}: {error}"[:1000]})
        return
    keeper.answer({"error": None})
    keeper.serve()


class Keeper:
    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given, self._driver = given, given["driver"]
        self._control = socket.socket(fileno=given["control"])
        self._folder = Path(given["folder"])
        self._elsewhere: set[Path] = set()
        """Published folders that go with the driver."""
        self._workers: set[int] = set()
        self._is_told = False
        """That the driver has no more use for it."""
        self._loaded: Any = None
        """Policy and engine, where workers are forks of them."""

    def prepare(self) -> None:
        given = self._given
        if given["engine"] == "inprocess" and given["model"]["device"] == "cpu":
            os.environ["OMP_NUM_THREADS"] = "1"  # read by torch as it is imported: no threads before a fork
            self._loaded = load_engine(given)
            import podium.server.app  # each worker would have to import it
            import podium.server.listen  # noqa: F401

            gc.freeze()  # or every worker's collector would copy the pages it looks at

    def answer(self, answer: Mapping[str, Any]) -> None:
        self._control.send(json.dumps(answer).encode())

    def serve(self) -> None:
        """Until the driver closes its end, or is gone."""
        self._control.settimeout(1.0)  # the socket may have been inherited by another child of a driver that is gone
        while os.getppid() == self._driver:
            try:
                message = self._control.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if not message:
                break
            order = json.loads(message)
            if "close" in order:
                self._is_told = True
                break
            self.answer(self._obey(order))
        self.end()

    def end(self, *_: object) -> None:
        """Kills every worker; the folder is the driver's to remove while that lives."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for worker in list(self._workers):
            self._bury(worker)
        kill_strays(())
        if not self._is_told and self._is_alone():
            shutil.rmtree(self._folder, ignore_errors=True)
            for published in self._elsewhere:
                published.with_name(f"{published.name}.json").unlink(missing_ok=True)
                shutil.rmtree(published, ignore_errors=True)
        os._exit(0)

    def _is_alone(self) -> bool:
        """Whether the driver is gone. Its sockets close, and its threads end, a moment before it does."""
        deadline = time.monotonic() + DYING_S
        while os.getppid() == self._driver and time.monotonic() < deadline:
            time.sleep(0.02)
        return os.getppid() != self._driver

    def _obey(self, order: Mapping[str, Any]) -> dict[str, Any]:
        if "start" in order:
            return self._fork(Path(order["start"]))
        if "bury" in order:
            return {"status": self._bury(order["bury"])}
        if "remember" in order:
            self._elsewhere.add(Path(order["remember"]))
        elif "forget" in order:
            self._elsewhere.discard(Path(order["forget"]))
        return {}

    def _bury(self, worker: int) -> int | None:
        if worker not in self._workers:
            return None
        self._workers.discard(worker)
        status = bury(worker, self._workers)
        shutil.rmtree(self._scratch(worker), ignore_errors=True)
        return status

    def _scratch(self, worker: int) -> Path:
        """What an engine leaves in its temporary folder goes with its worker."""
        return self._folder / "t" / str(worker)

    def _fork(self, path: Path) -> dict[str, Any]:
        keeper = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            return {"error": f"cannot fork: {error.strerror}"}
        if pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                die_with_parent(keeper)
                os.setsid()
                self._control.close()
                _use_for_scratch(self._scratch(os.getpid()))
                _serve(self._given, self._loaded, path, self._folder / "weights")
            except BaseException:
                traceback.print_exc(file=sys.stderr)
            finally:
                sys.stderr.flush()
                os._exit(1)
        self._workers.add(pid)
        return {"pid": pid}


def _use_for_scratch(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None  # looked up again


def load_engine(given: Mapping[str, Any]) -> Any:
    """The policy and its engine, as `model`, `engine`, `options` and `compute_dtype` say."""
    import torch

    from podium.lookup import find
    from podium.model.load import load_policy
    from podium.sections import Model

    policy = load_policy(Model.model_validate(given["model"]), seed=0)
    make, wiring = find("engine", given["engine"]), [policy, False]
    if given["compute_dtype"] and given["engine"] == "inprocess":
        wiring.append(getattr(torch, given["compute_dtype"]))
    return policy, make(*wiring, **given["options"])


def make_served(policy: Any, engine: Any, root: Path) -> Any:
    """One engine for weights of one kind, read under `root`."""
    from podium.errors import WeightsError
    from podium.server.served import Maker, Served

    def other_policy(shape: Any) -> Any:
        raise WeightsError("weights of another kind than this pool was made for")

    return Served(Maker(other_policy, lambda: policy, lambda _: engine, one_engine=True), root)


def _serve(given: Mapping[str, Any], loaded: Any, path: Path, root: Path) -> None:
    """A worker: serves on the socket until it is killed."""
    import torch

    from podium.server.app import make_app
    from podium.server.listen import listen, unix_socket

    if given["engine"] == "inprocess":
        torch.set_num_threads(given["threads"])
    policy, engine = loaded or load_engine(given)
    served = make_served(policy, engine, root)
    listen(make_app(served, None, given["engine"], lambda message: None), unix_socket(path), served.start)
