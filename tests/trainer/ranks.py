"""Two real processes in a gloo group, and the jobs that they do; the same jobs run alone in the test's own process."""

import asyncio
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from podium.loss.dapo import dapo
from podium.loss.grpo import grpo
from podium.loss.gspo import gspo
from podium.loss.objective import Correction, Objective
from podium.model.forward import PlacedBatch
from podium.pack import pack
from podium.records import Batch, Group, Prompt, Rollout, ids_digest
from podium.trainer.single import Single
from tests.commands import ROOT, ForkServer, fork_server

OBJECTIVES = {
    "grpo, tokens": Objective(grpo, "tokens", correction=Correction()),
    "gspo, rollouts": Objective(gspo, "rollouts", correction=Correction("sequence")),
    "dapo, constant": Objective(dapo, 7),
    "KL in the loss": Objective(grpo, kl_beta=0.1),
    "KL in the advantages": Objective(grpo, kl_beta=0.1, kl_estimator="in_advantages"),
}
VOCABULARY = 11
RARE = VOCABULARY - 1
PATIENCE_S = 300


class Tiny(torch.nn.Module):
    """A bigram policy in float64; another `seed` is another policy near by."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        random, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)

        def values(*shape: int) -> torch.nn.Parameter:
            base = torch.randn(*shape, generator=random, dtype=torch.float64)
            return torch.nn.Parameter(base + 0.1 * torch.randn(*shape, generator=other, dtype=torch.float64))

        self.table, self.head = values(VOCABULARY, 5), values(5, VOCABULARY)
        self.rare = values(VOCABULARY)
        """Takes part where a batch holds the token `RARE` only, so that a rank may have no gradient for it."""
        self.unused = values(3)
        self.dtype = torch.float64

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        previous = batch.token_ids.roll(1)
        logits = torch.tanh(self.table[previous]) @ self.head
        if (previous == RARE).any():
            logits = logits + self.rare * (previous == RARE)[:, None]
        every = (logits / batch.temperature).log_softmax(-1)
        chosen = every.gather(1, batch.token_ids[:, None])[:, 0]
        entropy = -(every.exp() * every).sum(-1).detach()
        return chosen * batch.loss_mask, entropy * batch.loss_mask


@dataclass(frozen=True)
class Example:
    """What one optimizer step trains."""

    answers: list[list[tuple[int, ...]]]
    """Ids by group and rollout."""
    advantages: list[list[float]]
    limit: int = 40
    """Tokens of a batch."""
    objective: str = "grpo, tokens"
    trouble: str = ""
    """What befalls rank 1: "memory" for one document at a time, "no memory" at all, wrong "ids" or a "nan"."""

    def batches(self, ranks: int) -> list[Batch]:
        groups = [
            Group(
                Prompt(number, (1, 2, number % VOCABULARY)),
                tuple(
                    Rollout(ids, (-2.0,) * len(ids), (1,) * len(ids), "stop", "", 0, 0, 0, 0, ids_digest(ids))
                    for ids in answers
                ),
                rewards=(1.0,) * len(answers),
                advantages=tuple(advantages),
            )
            for number, (answers, advantages) in enumerate(zip(self.answers, self.advantages, strict=True))
        ]
        return pack(groups, max_tokens_per_batch=self.limit, temperature=0.8, ranks=ranks)


class TinyTrainer(Single):
    """The trainer around `Tiny`."""

    def __init__(self, objective: Objective, trouble: str) -> None:
        model: Any = Tiny()
        device, trained = torch.device("cpu"), dict(model.named_parameters())
        policy: Any = SimpleNamespace(model=model, peft=None, device=device, trained_parameters=lambda: trained)
        super().__init__(policy, objective, compile=False, lr=1e-3)
        self._trouble = trouble

    def _logprobs(self, placed: PlacedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if self._trouble == "no memory" or (self._trouble == "memory" and placed.batch.num_documents > 1):
            raise torch.OutOfMemoryError("too large")
        return self._model(placed.batch)


def update(example: Example, rank: int = 0, ranks: int = 1) -> dict[str, Any]:
    """Gradients and metrics of the example's step, as plain numbers."""
    trouble = example.trouble if rank == 1 else ""
    trainer = TinyTrainer(OBJECTIVES[example.objective], trouble)
    placed = trainer._prepare([_prepared(batch, trouble) for batch in example.batches(ranks)[rank::ranks]])
    metrics = trainer._gradients(placed, [])
    gradients = {name: None if p.grad is None else p.grad.tolist() for name, p in trainer._parameters.items()}
    return {"metrics": metrics, "gradients": gradients, "halvings": trainer._halvings}


def _prepared(batch: Batch, trouble: str) -> Batch:
    """In float64, with old and reference logprobs that depend on the document alone."""
    wide = {name: getattr(batch, name).double() for name in ("loss_mask", "advantages", "rollout_logprobs")}
    batch = replace(batch, **wide)
    if trouble == "nan":
        batch.advantages[-1] = torch.nan
    if trouble == "ids":
        batch = replace(batch, digests=("no digest",) * batch.num_documents)
    with torch.no_grad():
        others = {"old_logprobs": Tiny(1)(batch)[0], "reference_logprobs": Tiny(2)(batch)[0]}
    return replace(batch, **others)


def single_steps(lora: bool, rank: int = 0, ranks: int = 1) -> list[dict[str, Any]]:
    """Steps of the real trainer on the embedded model; the last has one document, so that a rank has none of it."""
    from tests.trainer.test_single import a_group, a_trainer

    trainer = a_trainer(lora=lora, lr=1e-6)
    done = []
    for number in (4, 3, 1):
        batches = pack([a_group(trainer, number)], max_tokens_per_batch=60, temperature=1.0, ranks=ranks)
        result = asyncio.run(trainer.step(batches[rank::ranks]))
        done.append(
            {
                "metrics": dict(result.metrics),
                "gradients": {name: p.grad.tolist() for name, p in trainer._parameters.items()},
                "weights": {name: p.tolist() for name, p in trainer._parameters.items()},
            }
        )
    return done


def sharded_steps(
    name: str, options: dict[str, Any], lora: bool, folder: str, start: str | None = None, rank: int = 0, ranks: int = 1
) -> dict[str, Any]:
    """Two steps of a trainer by its name, from the checkpoint `start` if there is one; its own goes into `folder`.

    With a `reference` among the options the loss keeps near it.
    """
    from safetensors.torch import load_file, save_file

    from podium.model.load import load_policy
    from podium.settings.lookup import find
    from podium.settings.tables import Model
    from tests.trainer.test_single import a_group

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    section = Model.model_validate({"device": "cpu"} if lora else {"device": "cpu", "lora": False})
    loss = Objective(grpo, kl_beta=0.1 if "reference" in options else 0.0)
    trainer = find("trainer", name)(load_policy(section, seed=0), loss, 10, lr=1e-4, **options)
    if start is not None:
        trainer.load_state(load_file(start))
    metrics = []
    for number in (4, 3):
        batches = pack([a_group(trainer, number)], max_tokens_per_batch=60, temperature=1.0, ranks=ranks)
        metrics.append(dict(asyncio.run(trainer.step(batches[rank::ranks])).metrics))
        score = asyncio.run(trainer.score(list(range(3, 20))))  # as a run does after each push
    state = trainer.state()
    model = Path(folder) / f"model-{rank}"
    if rank:
        list(trainer.weights())  # rank 0 gathers them for its files
    else:
        save_file(state, Path(folder) / "state.safetensors")
        trainer.save_model(str(model))
    return {
        "metrics": metrics,
        "score": score,
        "state": {key: value.tolist() for key, value in state.items() if not key.startswith("random.")},
        "weights": {name: tensor.tolist() for name, tensor in trainer.weights()},
        "model": str(model),
        "offloaded": any(getattr(trainer._optimizer, name, False) for name in ("cpu_offload", "offload_optimizer")),
    }


def step_without_memory(name: str, options: dict[str, Any], rank: int = 0, ranks: int = 1) -> dict[str, float]:
    """A step of a trainer that runs out of memory once, in the middle of a backward pass."""
    from podium.model.load import load_policy
    from podium.settings.lookup import find
    from podium.settings.tables import Model
    from tests.trainer.test_single import a_group

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    policy = load_policy(Model.model_validate({"device": "cpu", "lora": False}), seed=0)
    trainer = find("trainer", name)(policy, Objective(grpo), 10, lr=1e-4, **options)
    left = [1]

    def run_out(module: Any, arriving: Any) -> None:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("too large")

    policy.model.get_submodule("model.layers.0.mlp").register_full_backward_pre_hook(run_out)
    batches = pack([a_group(trainer, 4)], max_tokens_per_batch=60, temperature=1.0, ranks=ranks)
    return dict(asyncio.run(trainer.step(batches[rank::ranks])).metrics)


def whole_run(tables: dict[str, Any], resume: bool = False, rank: int = 0, ranks: int = 1) -> str:
    """A run as `podium train` has it, or its resume; rank 0 leads and the other follows until it is told to end."""
    from podium.run import start as run
    from podium.run.folder import RunFolder
    from podium.runtime.local import serve_rank
    from podium.runtime.ranks import join
    from podium.settings.tables import Settings

    settings = Settings.from_dict(tables)
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "TORCHELASTIC_RUN_ID": "test"}
        os.environ |= {name: str(value) for name, value in names.items()}
    if rank:
        serve_rank(settings, join())
        return "followed"
    try:
        if resume:
            return run.resume(settings, RunFolder.open(Path(tables["run"]["folder"]))).state
        return run.train(settings).state
    finally:
        if ranks > 1:
            with join().order("end"):
                pass


def ranks_server() -> ForkServer:
    """Has imported what ranks need: DeepSpeed takes seconds, in each of them."""
    return fork_server(*(["deepspeed"] if find_spec("deepspeed") else []))


class Pair:
    """Ranks 0 and 1, forked from a process that has imported torch. They meet in a file, so no port has to be free."""

    def __init__(self, folder: Path) -> None:
        log, self.processes, self._pipes = folder / "ranks.log", [], []
        with (
            tempfile.TemporaryDirectory(prefix="pair-", dir="/tmp") as short,  # a socket's path is at most 107 bytes
            Listener(f"{short}/socket", "AF_UNIX") as listener,
        ):
            for rank in (0, 1):
                given = [rank, str(folder / "meeting"), listener.address]
                job = {"call": "tests.trainer.ranks:serve", "given": given}
                self.processes.append(ranks_server().start(stdout=log, stderr=log, folder=ROOT, **job))
                self._pipes.append(listener.accept())

    def start(self, rank: int, job: Any, *args: Any) -> None:
        self._pipes[rank].send((job, args))

    def result(self, rank: int) -> Any:
        """What the job returned, or the exception that it raised."""
        assert self._pipes[rank].poll(PATIENCE_S), f"rank {rank} does not answer"
        return self._pipes[rank].recv()

    def __call__(self, job: Any, *args: Any) -> list[Any]:
        for rank in (0, 1):
            self.start(rank, job, *args, rank, 2)
        return [self.result(rank) for rank in (0, 1)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait(60)
        for pipe in self._pipes:
            pipe.close()


def serve(rank: int, meeting: str, socket: str) -> None:
    """One rank of a pair, until it is killed."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    with Client(socket, "AF_UNIX") as pipe:
        torch.set_num_threads(1)
        wait = timedelta(seconds=PATIENCE_S)
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=wait)
        while True:
            job, args = pipe.recv()
            try:
                pipe.send(job(*args))
            except Exception as error:
                pipe.send(error)
