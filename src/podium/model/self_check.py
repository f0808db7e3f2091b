"""Checks once, when a model is loaded, that Podium's packed forward pass computes what the model itself computes.

Some architectures scale their logits, bias their LM head, pass more than queries, keys and values to attention, express
a window only in the mask, or route tokens at random in training; a trainer that ignores this would be wrong in silence.
So the packed forward pass, in train mode and run twice, is compared with transformers' eager one: of the model itself
on a few tokens, with a tolerance measured from its rounding, and of a small float32 copy of the same architecture on
documents of very different lengths, longer than every window. The copy exists because documents longer than a window of
4,096 tokens would take gigabytes in eager attention.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel

from podium.errors import InputError, first_line
from podium.model import attention
from podium.model.forward import head_weight, max_context_tokens, sequence_logprobs, text_config

LENGTHS = (24, 2, 7)
"""Tokens of the documents for the model itself."""
SMALL_LENGTHS = ((97, 9, 41, 10), (11, 9))
"""Tokens of the documents for the small copy: one set that needs several padded tables, and one that needs one."""
SMALL_TOLERANCE = 1e-3
"""Largest difference of a logprob of the small copy, which computes in float32."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest difference of a logprob, for rough comparisons: the structure has already been checked in float32."""
LEAST_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Smallest tolerance for the mean difference, however small the rounding is."""
TIMES_ROUNDING = 1.5
"""The mean difference may be this many times the one that changing every product by its last digit causes."""
MAX_TOKENS = 1024
"""Longest document for the model itself if there is no small copy."""
ADVICE = "use another architecture, such as Llama, Qwen, Mistral, Gemma 3 or SmolLM"


def check_model(model: PreTrainedModel, name: str) -> PreTrainedModel | None:
    """Raises `InputError` unless packed logprobs equal the model's own. Turns the model's dropout off permanently.

    Returns the small copy, on which engines check their decoding, or None if none could be built.
    """
    switch_dropout_off(model)
    small, reason = small_copy(model)
    lengths, windows = LENGTHS, windows_of(model.config)
    if small is None and windows:
        longest = max(windows.values()) + WINDOW
        if longest > MAX_TOKENS:
            named = ", ".join(f"{key} = {value}" for key, value in windows.items())
            raise InputError(
                f"{_title(model, name)} cannot be checked: its config has {named}, and no small copy of it can be "
                f"built to check them ({reason}); {ADVICE}"
            )
        lengths = (longest, *LENGTHS[1:])
    context = max_context_tokens(model.config)
    documents = texts(model, [min(length, context) for length in lengths])
    with _refusing(model, name):
        gap, allowed = max(map(fmean, _gaps(model, documents))), tolerance(model, model.dtype)
        gaps_of_small: list[float] = []
        if small is not None:
            for some in SMALL_LENGTHS:
                gaps_of_small += chain(*_gaps(small, texts(small, [min(length, context) for length in some])))
        gap_of_small = max(gaps_of_small, default=0.0) if all(map(math.isfinite, gaps_of_small)) else math.inf
    if not (gap <= allowed and gap_of_small <= SMALL_TOLERANCE):
        where = f"by {gap:.3g} on average" if not gap <= allowed else f"by {gap_of_small:.3g} beyond a few tokens"
        raise InputError(
            f"{_title(model, name)} is not computed correctly by Podium's packed forward pass: its logprobs differ "
            f"from the model's own {where}; {ADVICE}"
        )
    return small


def texts(model: PreTrainedModel, lengths: Sequence[int]) -> list[list[int]]:
    """Meaningless documents of these lengths."""
    rows = head_weight(model).shape[0]
    return [[(7 * i * i + 3 * i + length) % rows for i in range(1, length + 1)] for length in lengths]


def tolerance(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """Tolerance for the mean difference of two correct computations in this precision, measured by changing every
    product's result by its last digit."""
    [ids] = texts(model, LENGTHS[:1])
    with moved_products(model, torch.finfo(dtype).eps):
        moved = own_logprobs(model, ids)
    made = fmean(abs(a - b) for a, b in zip(own_logprobs(model, ids), moved, strict=True))
    return max(LEAST_TOLERANCE[dtype], TIMES_ROUNDING * made)


@contextmanager
def moved_products(model: PreTrainedModel, share: float) -> Iterator[None]:
    """Inside, every output element of each layer with a matrix is made a little larger or smaller."""
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
    """Logprobs from the model's own forward pass with transformers' eager attention, without dropout."""
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


def _gaps(model: PreTrainedModel, documents: list[list[int]]) -> list[list[float]]:
    """Differences per pass: the first document alone, then all documents packed, twice."""
    expected = [own_logprobs(model, ids) for ids in documents]
    everything = [value for values in expected for value in values]
    passes = [(documents[:1], expected[0]), (documents, everything), (documents, everything)]
    model.train()  # as in the trainer's step, so that randomness shows here
    try:
        return [
            [abs(a - b) for a, b in zip(sequence_logprobs(model, *some), wanted, strict=True)]
            for some, wanted in passes
        ]
    finally:
        model.eval()


@contextmanager
def _refusing(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Turns any error of an architecture into an `InputError` that names the model."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{_title(model, name)}: {error}") from None
    except Exception as error:
        raise InputError(
            f"{_title(model, name)} cannot run with Podium's packed forward pass ({type(error).__name__}: "
            f"{first_line(error)}); {ADVICE}"
        ) from None


def _title(model: PreTrainedModel, name: str) -> str:
    return f"model.name = {name!r} ({type(model).__name__})"


WINDOW = 8
VOCABULARY = 64
KEY_HEADS = 2
QUERIES_PER_KEY = 3
WIDTHS = {
    "intermediate_size": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size_mlp": 64,
    "hidden_size_per_layer_input": 16,
}
"""Small sizes of layers that no other size depends on."""
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WAYS = ((True, True), (True, False), (False, True), (False, False))
"""Whether the copy is narrow and has few experts. The smallest copy is tried first; not every architecture can be made
small through the config names known here."""
SIZES = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, **TOKEN_IDS}


def windows_of(config: Any) -> dict[str, int]:
    """Lengths in tokens at which attention changes, by their names in the config."""
    return {
        name: value
        for name, value in vars(text_config(config)).items()
        if name.endswith(("window", "window_size", "chunk_size", "topk"))
        and any(part in name for part in ("window", "attention_chunk", "index"))
        and type(value) is int
        and value > 0
    }


def small_copy(model: PreTrainedModel) -> tuple[PreTrainedModel | None, str]:
    """A small float32 model of the same architecture on the CPU, or None and the reason.

    It has few layers (one of each kind), few heads, narrow layers and windows of a few tokens. Its random weights are
    large enough that a wrong mask or scale shows. The global random state does not change.
    """
    reason = ""
    with torch.random.fork_rng(devices=[]):
        for is_narrow, has_few_experts in WAYS:
            torch.manual_seed(0)
            try:
                config = _small_config(model.config, is_narrow, has_few_experts)
                made = type(model)._from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
                _draw_weights(made)
                switch_dropout_off(made)
                made.set_attn_implementation("eager")
                with torch.no_grad():
                    made.eval()(input_ids=torch.arange(3, 3 + 2 * WINDOW)[None], use_cache=False)
                made.set_attn_implementation(attention.NAME)
            except Exception as error:  # architectures raise anything for sizes that do not fit together
                reason = first_line(error)
                continue
            return made, ""
    return None, reason


def _small_config(config: Any, is_narrow: bool, has_few_experts: bool) -> Any:
    small = copy.deepcopy(config)
    inner = text_config(small)
    _take_few_layers(inner)
    _set(inner, dict.fromkeys(windows_of(inner), WINDOW) | SIZES)
    if is_narrow:
        _set(inner, WIDTHS)
        _take_few_heads(inner)
    if has_few_experts:
        _take_few_experts(inner)
    for name, tower in vars(small).items():  # the encoders of a multimodal model
        if name.endswith("_config") and tower is not None and tower is not inner and not isinstance(tower, Mapping):
            _set(tower, {"num_hidden_layers": 1, "depth": 1, "intermediate_size": 16})
    if small is not inner:
        _set(small, TOKEN_IDS)
    return small


def _take_few_layers(config: Any) -> None:
    """One layer of each kind, according to the per-layer lists of the config, and at least two layers."""
    count = config.num_hidden_layers
    lists = {n: value for n, value in vars(config).items() if isinstance(value, list | tuple) and len(value) == count}
    kinds: dict[Any, int] = {}
    for layer in range(count):
        kinds.setdefault(tuple(repr(value[layer]) for value in lists.values()), layer)
    taken = sorted({*kinds.values(), *range(min(2, count))})
    for name, value in lists.items():
        _set(config, {name: [value[layer] for layer in taken]})
    _set(config, {"num_hidden_layers": len(taken), "num_kv_shared_layers": 0})


def _take_few_heads(config: Any) -> None:
    """Query heads share a key head if they did before, and heads keep their width."""
    heads = config.num_attention_heads
    of_keys = getattr(config, "num_key_value_heads", None) or heads
    head_dim = _plain(config, "head_dim") or config.hidden_size // heads
    few = min(of_keys, KEY_HEADS)
    few_heads = few * min(heads // of_keys, QUERIES_PER_KEY)
    _set(config, {"num_key_value_heads": few, "num_attention_heads": few_heads})
    if _plain(config, "num_global_key_value_heads"):
        _set(config, {"num_global_key_value_heads": few})
    _set(config, {"hidden_size": few_heads * head_dim})


def _take_few_experts(config: Any) -> None:
    """Each token still uses as many experts as before."""
    chosen = max(_plain(config, "num_experts_per_tok") or 0, _plain(config, "moe_k") or 0, 2)
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        many = _plain(config, name)
        if isinstance(many, int) and many > 2 * chosen:
            groups = _plain(config, "n_group") or 1
            _set(config, {name: -(-2 * chosen // groups) * groups})


def _plain(config: Any, name: str) -> Any:
    """The value, or None if the config has no such value or it differs between layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises its own where the value depends on the layer
        return None


def _set(config: Any, values: Mapping[str, Any]) -> None:
    """Sets the values that the config has; ignores the others."""
    for name, value in values.items():
        if _plain(config, name) is not None:
            setattr(config, name, value)


def switch_dropout_off(model: PreTrainedModel) -> None:
    """Permanently, because sampler and trainer must agree. An adapter that is added later may have its own dropout."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@torch.no_grad()
def _draw_weights(model: PreTrainedModel) -> None:
    """Products keep the size of their input; biases and norms move away from their initial values."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.3 * torch.randn_like(parameter))
    head: Any = model.get_output_embeddings()
    head.weight.normal_(0.0, 3.0 * head.weight.shape[1] ** -0.5)
