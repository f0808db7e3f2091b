"""What is simulated and what comes out."""

from dataclasses import dataclass
from typing import Literal

from _simulator.lengths import Lengths
from podium.records import Plan

TREE_WIDTH = 16
CANARY_S, CANARY_EVERY_S = 0.04, 0.4
"""CPU seconds of a burst of the canary, and the pause after one."""


@dataclass(frozen=True)
class Costs:
    """Seconds, of one core where a CPU does it; bytes a second for what is carried."""

    decode_step_s: float = 0.0
    """A decode step of a batch, whatever its size."""
    decode_token_s: float = 0.0
    """And for each rollout in it."""
    parcel_s: float = 0.0
    """Of a worker, for a request: reading it, its prompts' prefill."""
    send_s: float = 0.0
    """Of the driver, for a request."""
    route_s: float = 0.0
    """Of the driver, for a request and each worker there is: the pool looks at all of them."""
    receive_rollout_s: float = 0.0
    """Of the driver, until a rollout is a record with its reward."""
    receive_token_s: float = 0.0
    score_s: float = 0.0
    """Until a reward from elsewhere (a judge, a sandbox) is known; no work of the driver."""
    pack_token_s: float = 0.0
    order_token_s: float = 0.0
    """Of the driver, for a token that goes to another rank."""
    train_step_s: float = 0.0
    train_token_s: float = 0.0
    """Of one rank."""
    report_step_s: float = 0.0
    report_rollout_s: float = 0.0
    report_token_s: float = 0.0
    publish_s: float = 0.0
    """Of the driver: weights into a folder, and the trainer's probe."""
    push_worker_s: float = 0.0
    """Of the driver, for each worker that is told and probed."""
    sync_wait_s: float = 0.0
    """Of a push, in which no core works: files that are flushed, questions that are asked again after a pause."""
    load_s: float = 0.0
    """Of each worker: reading and checking weights, and the probe."""
    token_bytes: float = 0.0
    """Of an answer's token on its way to the driver: id and logprob."""
    driver_bytes_per_s: float = float("inf")
    weight_bytes: float = 0.0
    storage_bytes_per_s: float = float("inf")
    """All workers together, where they read new weights."""
    link_bytes_per_s: float = float("inf")
    """Between two GPUs or two machines: gradients, and weights from worker to worker."""
    trainer_in_driver: bool = False
    """Whether training holds the driver's interpreter, as a small model on a CPU does; on a GPU it does not."""


@dataclass(frozen=True)
class Scenario:
    plan: Plan
    workers: int
    costs: Costs
    lengths: Lengths
    ranks: int = 1
    concurrency: int = 64
    """Rollouts in flight at a worker."""
    prompts_per_request: int = 1
    in_order: bool = False
    prompt_tokens: int = 0
    cores: float | None = None
    """That driver and workers share; None: every worker has a device and the driver a core."""
    others: float = 0.0
    """Sessions of others that want these cores all the time."""
    canary: bool = False
    """Whether a process beside the run, in a session of its own, measures how much of a core it gets."""
    fan_out: Literal["folder", "tree"] = "folder"
    """New weights: every worker reads them from storage and is told by the driver, or each hands them on to
    `TREE_WIDTH` others."""
    warm_up: int = 2
    """Steps that are not counted."""


@dataclass(frozen=True)
class Outcome:
    """Over the steps after the warm-up, those at the end aside for which nothing is sent ahead any more."""

    steps: int
    step_s: float
    rollouts_per_s: float
    tokens_per_s: float
    """Generated and trained."""
    worker_busy: float
    """Share of the time in which a worker writes, on average."""
    slots_busy: float
    """Share of the rollouts that workers could have in flight; low where they wait for the longest."""
    trainer_busy: float
    driver_busy: float
    sync_share: float
    """Of the time, in pushes."""
    lag_mean: float
    lag_max: int
    stale: int
    """Groups that were too old and were sampled again."""
    driver_mb_per_s: float
    canary_stretch: float = 1.0
    """Seconds that the canary takes for a second of CPU, on average."""
