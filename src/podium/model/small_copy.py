"""A small model of the same architecture, on which everything that depends on lengths can be tried at little cost.

A window of 4,096 tokens can only be seen to be kept by documents that are longer, and transformers' plain attention
over those takes gigabytes. So the config is made small: few layers (one of each kind), few heads, narrow, and its
windows a few tokens long. What the architecture does stays as it is. The weights are random, and large enough that a
wrong mask or scale shows.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from podium.model import attention
from podium.model.forward import text_config

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
"""Of layers that nothing else depends on."""
TOKEN_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WAYS = ((True, True), (True, False), (False, True), (False, False))
"""Whether the copy is narrow and has few experts: from the smallest to the most cautious, since not every architecture
can be made small by the names that are known here."""
SIZES = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, **TOKEN_IDS}


def windows_of(config: Any) -> dict[str, int]:
    """Lengths in tokens at which attention changes, by their names in the config."""
    given = vars(text_config(config))
    return {name: value for name, value in given.items() if _is_window(name) and type(value) is int and value > 0}


def _is_window(name: str) -> bool:
    is_length = name.endswith(("window", "window_size", "chunk_size", "topk"))
    return is_length and any(part in name for part in ("window", "attention_chunk", "index"))


def small_copy(model: PreTrainedModel) -> tuple[PreTrainedModel | None, str]:
    """A float32 copy on the CPU, or None and the reason. Does not touch the global random state."""
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
            except Exception as error:  # whatever an architecture makes of sizes that do not fit together
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
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
    for tower in _towers(small, inner):
        _set(tower, {"num_hidden_layers": 1, "depth": 1, "intermediate_size": 16})
    if small is not inner:
        _set(small, TOKEN_IDS)
    return small


def _take_few_layers(config: Any) -> None:
    """One of each kind that the lists of the config tell apart, and at least two."""
    count = config.num_hidden_layers
    lists = {name: value for name, value in vars(config).items() if _is_list_of(value, count)}
    kinds: dict[Any, int] = {}
    for layer in range(count):
        kinds.setdefault(tuple(repr(value[layer]) for value in lists.values()), layer)
    taken = sorted({*kinds.values(), *range(min(2, count))})
    for name, value in lists.items():
        _set(config, {name: [value[layer] for layer in taken]})
    _set(config, {"num_hidden_layers": len(taken), "num_kv_shared_layers": 0})


def _is_list_of(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count


def _take_few_heads(config: Any) -> None:
    """Several queries share a key if they did before, and heads are as wide as before."""
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
    """Each token still goes to as many as before."""
    chosen = max(_plain(config, "num_experts_per_tok") or 0, _plain(config, "moe_k") or 0, 2)
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        many = _plain(config, name)
        if isinstance(many, int) and many > 2 * chosen:
            groups = _plain(config, "n_group") or 1
            _set(config, {name: -(-2 * chosen // groups) * groups})


def _towers(config: Any, inner: Any) -> Iterator[Any]:
    """Configs of the encoders of a multimodal model."""
    for name, value in vars(config).items():
        if name.endswith("_config") and value is not None and value is not inner and not isinstance(value, Mapping):
            yield value


def _plain(config: Any, name: str) -> Any:
    """The value, or None if the config has no such value or it differs between layers."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers raises its own where the value depends on the layer
        return None


def _set(config: Any, values: Mapping[str, Any]) -> None:
    """What the config has; the rest is left out."""
    for name, value in values.items():
        if _plain(config, name) is not None:
            setattr(config, name, value)


def switch_dropout_off(model: PreTrainedModel) -> None:
    """For good: sampler and trainer must agree. An adapter that is added later may still have its own."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@torch.no_grad()
def _draw_weights(model: PreTrainedModel) -> None:
    """Products keep the size of what they are given; biases, norms and the like move from where they start."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.3 * torch.randn_like(parameter))
    head: Any = model.get_output_embeddings()
    head.weight.normal_(0.0, 3.0 * head.weight.shape[1] ** -0.5)
