"""A model, an engine and the HTTP server, wired: for `podium serve`, for the workers of a pool and for Ray's actors.

A pool's workers are forked (remote/fork_server.py). In-process engines on a CPU are loaded before the fork, once: a
worker starts in milliseconds and all share the memory of the base weights. Other engines are loaded by each worker.
"""

import inspect
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from podium.engine.build import cpu_team
from podium.errors import InputError, WeightsError
from podium.export import find_trained
from podium.model.load import Policy, load_policy
from podium.server.app import make_app
from podium.server.door import digest, listen, tcp_socket, unix_socket, url_of
from podium.server.served import AdapterShape, Maker, Served
from podium.settings.lookup import engine_traits, engines_in_workers, find
from podium.settings.sections import Lora, Model
from podium.settings.tables import Settings, override
from podium.stages import Engine
from podium.untrusted import warn

MIN_TOKEN = 16
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000


@dataclass(frozen=True)
class ServeOptions:
    """The flags of `podium serve`."""

    model: str
    host: str | None
    port: int | None
    uds: Path | None
    token_file: Path | None
    root: Path | None
    engine: str
    tp: int | None
    lora_rank: int | None


def serve(options: ServeOptions, overrides: list[str]) -> int:
    if options.uds is not None and (options.host, options.port) != (None, None):
        raise InputError("--host and --port have no effect together with --uds; remove them, or remove --uds")
    token = _token(options)
    settings, weights = _settings(options, overrides)
    port = DEFAULT_PORT if options.port is None else options.port
    listener = unix_socket(options.uds) if options.uds else tcp_socket(options.host or DEFAULT_HOST, port)
    with listener, cpu_team(settings), tempfile.TemporaryDirectory(prefix="podium-serve-") as own:
        try:
            root = options.root or Path(own)
            root.mkdir(parents=True, exist_ok=True)
            served = Served(_maker(settings, weights, options.lora_rank), root.resolve())
            app = make_app(served, token, settings.engine.name, _log, _public_name(options.model))

            async def started() -> None:
                await served.start()
                place = f"at {url_of(listener)}, weights by id under {served.root}"
                _log(f"{options.model} by {settings.engine.name} {place}")

            try:
                listen(app, listener, started)
            finally:
                served.close()
        finally:
            if options.uds:
                options.uds.unlink(missing_ok=True)
    return 0


def _log(message: str) -> None:
    warn(f"podium serve: {message}")


def _public_name(model: str) -> str:
    """The model's name for clients: a hub name, or the last part of a folder, which reveals no path of this machine."""
    return Path(model).resolve().name if Path(model).exists() else model


def _token(options: ServeOptions) -> bytes | None:
    """The hash of the token. A port needs one, since every program that reaches it could use the engine; a socket that
    only this user can open does not."""
    path = options.token_file
    if path is None and options.uds is not None:
        return None
    if path is None:
        raise InputError(
            f"--host {options.host or DEFAULT_HOST}: a port is open to others; give --token-file FILE (made with a new "
            "token if it is not there), or --uds PATH for a socket of your own"
        )
    if not path.exists():
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise InputError(f"--token-file {path}: {error.strerror}") from None
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    return digest(read_token(path))


def read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        raise InputError(f"--token-file {path}: no file of ASCII text that can be read") from None
    if len(token) < MIN_TOKEN or not token.isprintable() or " " in token:
        raise InputError(f"--token-file {path}: a token is one line of at least {MIN_TOKEN} characters without spaces")
    return token


def _settings(options: ServeOptions, overrides: list[str]) -> tuple[Settings, Path | None]:
    """The `[model]` and `[engine]` sections, and the trained weights that replace the model's, if there are any."""
    trained = find_trained(options.model)
    for flag in overrides:
        if not flag.startswith(("--model.", "--engine.")):
            raise InputError(
                f"podium serve takes no {flag.partition('=')[0]}; --model.key=value and --engine.key=value"
            )
    if engine_traits(options.engine).outlives_run:
        raise InputError(f"--engine {options.engine} is a client of a server; give {' or '.join(engines_in_workers())}")
    if any(flag.partition("=")[0] == "--engine.sleep" for flag in overrides):
        raise InputError("--engine.sleep has no effect: a server does not know when a trainer steps; remove it")
    engine = {"name": options.engine} | ({"tensor_parallel": options.tp} if options.tp is not None else {})
    return Settings.from_dict(override({"model": trained.model, "engine": engine}, overrides)), trained.weights


def _maker(settings: Settings, weights: Path | None, lora_rank: int | None) -> Maker:
    adapter = weights if weights is not None and (weights / "adapter_config.json").is_file() else None
    full = weights if adapter is None else None
    own_lora: Any = False if lora_rank is None else Lora(r=lora_rank)

    def load(lora: Any, own: Path | None) -> Policy:
        return load_policy(settings.model.model_copy(update={"lora": lora}), seed=settings.run.seed, weights=own)

    def policy(shape: AdapterShape | None) -> Policy:
        if shape is None:
            return load(False, full)
        return load(Lora(r=shape.r, alpha=shape.lora_alpha, targets=sorted(shape.target_modules)), full)

    def engine(policy: Policy) -> Engine:
        return find("engine", settings.engine.name)(policy, False, **settings.engine.options)

    return Maker(policy, lambda: load(own_lora, adapter or full), engine, not settings.engine_traits.shares_weights)


class PoolWorker:
    """`given`: the model and the engine (`load_engine`); `threads`: of the engine; `root`: where weights are read."""

    def __init__(self, given: Mapping[str, Any], threads: int, root: str) -> None:
        self._name, self._threads, self._root = given["engine"], threads, Path(root)
        self._policy, self._engine = load_engine(given)

    def listen(self, path: bytes, reply: Callable[[bytes], None]) -> None:
        """Serves on a socket at that path until the process is killed; replies once the server accepts requests."""
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
    """The policy and its engine. `given` has the keys `model`, `engine`, `options` and `compute_dtype`."""
    policy = load_policy(Model.model_validate(given["model"]), seed=0)
    make, wiring = find("engine", given["engine"]), {}
    if given["compute_dtype"] and "compute_dtype" in inspect.signature(make).parameters:
        wiring["compute_dtype"] = getattr(torch, given["compute_dtype"])
    return policy, make(policy, False, **wiring, **given["options"])


def make_served(policy: Any, engine: Any, root: Path) -> Any:
    """Serves one engine, with weights of one kind only, read under `root`."""

    def other_policy(shape: Any) -> Any:
        raise WeightsError("weights of another kind than this pool was made for")

    return Served(Maker(other_policy, lambda: policy, lambda _: engine, one_engine=True), root)
