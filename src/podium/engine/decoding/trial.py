"""Trials of an engine before a run uses it.

Decoding is tried on the small copy of the model, beyond every window and with prompts of different lengths.

If an engine's kernels cannot be inspected, large trial adapters show whether it applies adapters on every layer: its
logprobs are compared with those of the same base model here. Each branch is a quarter as large as its layer, so a
missing decoder layer or a wrong scale changes logprobs by far more than rounding does. Each trial covers a few decoder
layers: with such an adapter on all layers of a deep model, rounding itself would grow as large as the error to find.
The size of rounding is measured first, with an adapter of zeros.
"""

import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from podium.engine.cuda.captured import CapturedDecoder
from podium.engine.decoding.queue import Decoder, decode_now
from podium.errors import InputError, ParityError, first_line
from podium.model.device_thread import on_device_thread
from podium.model.evidence import fixed_signs, mean_gap
from podium.model.forward import sequence_logprobs
from podium.model.load import Policy, twin_of
from podium.model.self_check import own_logprobs, texts
from podium.records import PrefixGroup, Request, Sampling

PROMPTS = (29, 3)
NEW_TOKENS = 27


def small_policy(policy: Policy) -> Policy | None:
    """The small copy as a policy of its own, without an adapter."""
    small = policy.small
    if small is None:
        return None
    return replace(policy, model=small, twin=twin_of(small), peft=None, device=small.device, small=None)


def refuse_gap(gap: float, allowed: float) -> None:
    if not gap <= allowed:
        raise InputError(
            f"engine.name = 'inprocess' cannot decode this architecture: logprobs differ by {gap:.3g} from those of a "
            "plain forward pass; use another model, or engine.name = 'vllm_local'"
        )


def gaps(decoder: Decoder, requests: Sequence[Request], score: Callable[[list[int]], list[float]]) -> list[float]:
    """How far the logprobs of what is decoded are from those of `score`; infinite if one is not a finite number."""
    found: list[float] = []
    for request, answer in zip(requests, decode_now(decoder, requests), strict=True):
        expected = score([*request.token_ids, *answer.token_ids])[len(request.token_ids) - 1 :]
        found += [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)]
    return found if all(map(math.isfinite, found)) else [math.inf]


def small_gap(decoder: Decoder, policy: Policy) -> float:
    """Largest difference between the logprobs of what is decoded and those of transformers' plain forward pass."""
    small, max_context_tokens = policy.model, policy.max_context_tokens
    new_tokens = min(NEW_TOKENS, max(1, max_context_tokens // 2))
    prompts = texts(small, [max(1, min(length, max_context_tokens - new_tokens)) for length in PROMPTS])
    sampling = Sampling(max_new_tokens=new_tokens)
    requests = [
        Request(tuple(ids), sampling, 2 * place + k, PrefixGroup(str(place), 2))
        for place, ids in enumerate(prompts)
        for k in range(2)
    ]
    return max(gaps(decoder, requests, partial(own_logprobs, small)))


def captured_gap(policy: Policy) -> float:
    """The same for the steps that are captured on a GPU. They take a copy of the model whose layers are still plain: an
    engine on a CPU packs those of `policy.twin`."""
    return small_gap(CapturedDecoder(twin_of(policy.model), 2 * len(PROMPTS), None, lambda: 0), policy)


@contextmanager
def refusing_to_decode() -> Iterator[None]:
    """Whatever an architecture raises inside becomes a refusal."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"engine.name = 'inprocess' cannot decode this architecture ({type(error).__name__}: {first_line(error)}); "
            "use another model, or engine.name = 'vllm_local'"
        ) from None


SHARE = 0.25
"""Size of a trial adapter's branch, relative to its layer's own output."""
NUM_TOKENS = 32
MAX_GROUPS = 8
FLOOR = {"float32": 1e-3, "bfloat16": 0.05}
"""A mean difference of logprobs of this size is always allowed, as rounding."""
SAFETY = 4.0
"""The allowed difference is this many times the one measured with an adapter of zeros."""

Load = Callable[[dict[str, torch.Tensor]], Awaitable[None]]
Score = Callable[[list[int]], Awaitable[list[float]]]


async def check_application(policy: Policy, precision: str, load: Load, score: Score, name: str) -> None:
    """Raises `ParityError` naming the engine unless it applies trial adapters as the base model here does.

    `load` and `score` belong to the engine; the last adapter loaded holds zeros.
    """
    ids = trial_tokens(policy)
    nothing = trial_adapter(policy, ())
    await load(nothing)
    noise = mean_gap(await score(ids), await on_device_thread(trial_logprobs, policy, nothing, ids))
    allowed = max(FLOOR[precision], SAFETY * noise)
    for group in layer_groups(policy):
        adapter = trial_adapter(policy, group)
        await load(adapter)
        gap = mean_gap(await score(ids), await on_device_thread(trial_logprobs, policy, adapter, ids))
        if not gap <= allowed:
            raise ParityError(
                f"engine {name} does not apply adapters as the trainer does: with a trial adapter on {group[0]} and "
                f"{len(group) - 1} other layers its logprobs differ by {gap:.2g}; {allowed:.2g} is allowed"
            )
    await load(nothing)


def layer_groups(policy: Policy) -> list[list[str]]:
    """The adapted layers in a few groups; those of one decoder layer are in the same group."""
    groups: dict[int, list[str]] = {}
    for name, _ in policy.named_weights():
        layer, _, half = name.rpartition(".lora_")
        if half == "A":
            number = next((int(part) for part in layer.split(".") if part.isdigit()), 0)
            groups.setdefault(number % MAX_GROUPS, []).append(layer)
    return list(groups.values())


def trial_tokens(policy: Policy) -> list[int]:
    return [(7 * i * i + 3 * i + 5) % policy.vocabulary for i in range(1, NUM_TOKENS + 1)]


@torch.no_grad()
def trial_adapter(policy: Policy, layers: Collection[str]) -> dict[str, torch.Tensor]:
    """Tensors by the names of `Policy.named_weights`; zero in all other layers."""
    made: dict[str, torch.Tensor] = {}
    for number, (name, tensor) in enumerate(policy.named_weights()):
        layer, _, half = name.rpartition(".lora_")
        if layer not in layers:
            made[name] = torch.zeros_like(tensor)
            continue
        signs = fixed_signs(number, tensor.shape, tensor.device)
        rows, columns = tensor.shape
        if half == "A":
            size = columns**-0.5
        else:
            base: Any = policy.twin.get_submodule(layer)
            size = float(SHARE * base.weight.float().norm()) / (policy.adapter_scale * (rows * columns) ** 0.5)
        made[name] = (signs * size).to(tensor.dtype)
    return made


@torch.no_grad()
def trial_logprobs(policy: Policy, adapter: dict[str, torch.Tensor], token_ids: list[int]) -> list[float]:
    """Logprobs of the base model with this adapter added to its layers."""

    def branch(a: torch.Tensor, b: torch.Tensor) -> Any:
        def add(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
            x = inputs[0].to(a.dtype)
            return output + ((x @ a.t()) @ b.t() * policy.adapter_scale).to(output.dtype)

        return add

    with ExitStack() as hooks:
        for name, a in adapter.items():
            layer, _, half = name.rpartition(".lora_")
            if half == "A":
                hook = policy.twin.get_submodule(layer).register_forward_hook(branch(a, adapter[f"{layer}.lora_B"]))
                hooks.callback(hook.remove)
        return sequence_logprobs(policy.twin, token_ids)
