"""Whether Podium computes what the model means, asked once when it is loaded.

Some architectures scale their logits, bias their LM head, give attention more than queries, keys and values, tell a
window by the mask alone or route tokens at random while they train; a trainer that does not know would be wrong in
silence. So the packed forward pass, in train mode and twice, is compared with transformers' plain eager one: of the
model itself on a few tokens, with a tolerance measured from its rounding, and of a small copy in float32 on documents
that differ tenfold in length and are longer than every window.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from podium.errors import InputError
from podium.model import attention
from podium.model.forward import head_weight, max_context_tokens, sequence_logprobs
from podium.model.small_copy import WINDOW, small_copy, switch_dropout_off, windows_of

LENGTHS = (24, 2, 7)
"""Tokens of the documents that go through the model itself."""
SMALL_LENGTHS = ((97, 9, 41, 10), (11, 9))
"""Of those that go through the small copy: in several tables of padded rows, and in one."""
SMALL_TOLERANCE = 1e-3
"""Largest difference of a logprob of the small copy, which computes in float32."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest difference of a logprob, for rough comparisons: the structure has been looked at in float32 already."""
LEAST_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Of the mean difference, however little rounding does."""
TIMES_ROUNDING = 1.5
"""The mean difference may be so many times that which moving every product by its last digit makes."""
MOST_TOKENS = 1024
"""Of a document that goes through the model itself because there is no small copy."""
ADVICE = "use another architecture, such as Llama, Qwen, Mistral, Gemma 3 or SmolLM"


def check_model(model: PreTrainedModel, name: str) -> PreTrainedModel | None:
    """Raises `InputError` unless packed logprobs are those of the model itself, its dropout switched off for good.

    Returns the small copy, on which engines check their decoding, or None if none could be built.
    """
    switch_dropout_off(model)
    small, reason = small_copy(model)
    lengths, windows = LENGTHS, windows_of(model.config)
    if small is None and windows:
        longest = max(windows.values()) + WINDOW
        if longest > MOST_TOKENS:
            named = ", ".join(f"{key} = {value}" for key, value in windows.items())
            raise InputError(
                f"{_title(model, name)} cannot be checked: its config has {named}, and no small copy of it can be "
                f"built to see that they are kept ({reason}); {ADVICE}"
            )
        lengths = (longest, *LENGTHS[1:])
    context = max_context_tokens(model.config)
    documents = texts(model, [min(length, context) for length in lengths])
    with _refusing(model, name):
        gap, allowed = _mean_gap(model, documents), tolerance(model, model.dtype)
        gap_of_small = 0.0 if small is None else max(_small_gap(small, lengths, context) for lengths in SMALL_LENGTHS)
    if not (gap <= allowed and gap_of_small <= SMALL_TOLERANCE):
        where = f"by {gap:.3g} on average" if not gap <= allowed else f"by {gap_of_small:.3g} beyond a few tokens"
        raise InputError(
            f"{_title(model, name)} is not computed rightly by Podium's packed forward pass: its logprobs differ from "
            f"the model's own {where}; {ADVICE}"
        )
    return small


def texts(model: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    """Documents without a meaning."""
    rows = head_weight(model).shape[0]
    return [[(7 * i * i + 3 * i + length) % rows for i in range(1, length + 1)] for length in lengths]


def tolerance(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """Of the mean difference between two right computations in this precision, by moving every product's result."""
    [ids] = texts(model, LENGTHS[:1])
    with moved_products(model, torch.finfo(dtype).eps):
        moved = own_logprobs(model, ids)
    made = fmean(abs(a - b) for a, b in zip(own_logprobs(model, ids), moved, strict=True))
    return max(LEAST_TOLERANCE[dtype], TIMES_ROUNDING * made)


@contextmanager
def moved_products(model: PreTrainedModel, share: float) -> Iterator[None]:
    """Inside, what each layer that multiplies with a matrix gives is a little larger or smaller, number by number."""
    generator = torch.Generator().manual_seed(0)

    def move(module: Any, args: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        signs = torch.randint(0, 2, output.shape, generator=generator).to(output) * 2 - 1
        return output * (1 + share * signs)

    layers = [module for module in model.modules() if getattr(getattr(module, "weight", None), "ndim", 0) == 2]
    hooks = [layer.register_forward_hook(move) for layer in layers if not isinstance(layer, torch.nn.Embedding)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def own_logprobs(model: PreTrainedModel, ids: Sequence[int]) -> list[float]:
    """By the model's own forward pass, with transformers' plain attention, as it is for users: without dropout."""
    was_training = model.training
    model.set_attn_implementation("eager")
    try:
        given = torch.tensor([list(ids)], device=head_weight(model).device)
        logits: Any = model.eval()(input_ids=given, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(attention.NAME)
        model.train(was_training)
    every = logits.float().log_softmax(-1)
    return [float(every[t - 1, ids[t]]) for t in range(1, len(ids))]


def _mean_gap(model: PreTrainedModel, documents: list[list[int]]) -> float:
    return max(fmean(gaps) for gaps in _gaps(model, documents))


def _small_gap(small: PreTrainedModel, lengths: Sequence[int], context: int) -> float:
    """The largest."""
    passes = _gaps(small, texts(small, [min(length, context) for length in lengths]))
    return max(max(gaps) if all(map(math.isfinite, gaps)) else math.inf for gaps in passes)


def _gaps(model: PreTrainedModel, documents: list[list[int]]) -> list[list[float]]:
    """Of each pass: the first document alone, and all of them packed, twice."""
    expected = [own_logprobs(model, ids) for ids in documents]
    everything = [value for values in expected for value in values]
    passes = [(documents[:1], expected[0]), (documents, everything), (documents, everything)]
    model.train()  # as the trainer's step does: what is drawn at random shows here
    try:
        return [
            [abs(a - b) for a, b in zip(sequence_logprobs(model, *some), wanted, strict=True)]
            for some, wanted in passes
        ]
    finally:
        model.eval()


@contextmanager
def _refusing(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Whatever an architecture raises inside becomes a refusal."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{_title(model, name)}: {error}") from None
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f"{_title(model, name)} cannot run: Podium's packed forward pass does not suit it ({type(error).__name__}: "
            f"{reason}); {ADVICE}"
        ) from None


def _title(model: PreTrainedModel, name: str) -> str:
    return f"model.name = {name!r} ({type(model).__name__})"
