"""Tries out an engine's decoding on the small copy of the model: beyond every window, with prompts of different
lengths."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from podium.engine.cuda.captured import CapturedDecoder
from podium.engine.decoding.queue import Decoder, decode_now
from podium.errors import InputError
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
    answers = decode_now(decoder, requests)
    gaps = [0.0 if len(answers) == len(requests) else math.inf]
    for request, answer in zip(requests, answers, strict=False):
        expected = own_logprobs(small, [*request.token_ids, *answer.token_ids])[len(request.token_ids) - 1 :]
        gaps += [abs(a - b) for a, b in zip(answer.logprobs, expected, strict=True)]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


def captured_gap(policy: Policy, concurrency: int) -> float:
    """The same for the steps that are captured on a GPU. They take a copy of the model whose layers are still plain: an
    engine on a CPU packs those of `policy.twin`."""
    return small_gap(CapturedDecoder(twin_of(policy.model), concurrency, None, lambda: 0), policy)


@contextmanager
def refusing_to_decode() -> Iterator[None]:
    """Whatever an architecture raises inside becomes a refusal."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"engine.name = 'inprocess' cannot decode this architecture ({type(error).__name__}: {reason}); use "
            "another model, or engine.name = 'vllm_local'"
        ) from None
