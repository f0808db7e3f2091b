"""The forward pass: the policy's logprobs on a packed batch, and the matrix products that trainer and engines share.

In: a causal language model of transformers and a batch. Out: logprob and entropy of each loss token, flat `[T]`, 0
elsewhere. Only the loss tokens go through the LM head, one chunk of rows at a time.

The backward pass needs d logprob / d logits, which depends on nothing later. So the forward pass keeps it, in the
precision of the products, for as many rows as a limit allows; for the other rows logits are computed again. Memory then
does not grow with vocabulary times tokens. The entropy carries no gradient.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, TypeVar

import torch
from torch.utils._triton import has_triton
from transformers import PreTrainedModel

from podium.errors import InputError
from podium.model.attention import PackedRow, row_of
from podium.records import Batch


@dataclass(frozen=True)
class PlacedBatch:
    """A batch on the model's device, and the row that goes through the model."""

    batch: Batch
    row: PackedRow

    def with_fields(self, **changes: torch.Tensor) -> "PlacedBatch":
        """The same with other tensors in the batch; the row does not depend on these."""
        return PlacedBatch(replace(self.batch, **changes), self.row)


def place(batch: Batch, device: torch.device, *, shared_prefix: bool = False) -> PlacedBatch:
    """Moves a batch from the CPU to the device, with its row."""
    return to_device(PlacedBatch(batch, row_of(batch, shared_prefix=shared_prefix)), device)


def policy_logprobs(
    model: PreTrainedModel, placed: PlacedBatch, compute_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropies) at the batch's temperature; the logprob of token t comes from the state at t − 1.

    `compute_dtype` is the dtype of the matrix products if it differs from the weights'; logits and what follows are
    float32.
    """
    batch, row = placed.batch, placed.row
    with torch.autocast(row.token_ids.device.type, dtype=compute_dtype, enabled=compute_dtype is not None):
        hidden = decoder_states(
            model,
            input_ids=row.token_ids[None],
            position_ids=row.position_ids[None],
            attention_mask=None,
            use_cache=False,
            segments=row.segments,
        )[0]
    if compute_dtype is not None:
        hidden = hidden.to(compute_dtype)
    chosen, entropy = token_logprobs(
        hidden.index_select(0, row.states),
        head_weight(model),
        batch.token_ids.index_select(0, row.loss_places),
        temperature=batch.temperature,
        softcap=softcap(model),
    )
    flat = chosen.new_zeros(len(batch.token_ids))
    return flat.index_copy(0, row.loss_places, chosen), flat.index_copy(0, row.loss_places, entropy)


def decoder_states(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """The last layer's states `[rows, tokens, hidden]`, before the LM head."""
    made = model.get_decoder()(**inputs)
    if not hasattr(made, "last_hidden_state"):
        raise InputError(
            f"the decoder of a {type(model).__name__} gives no hidden states, so its logprobs cannot be computed; use "
            "another model"
        )
    return made.last_hidden_state


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel, *documents: list[int], compute_dtype: torch.dtype | None = None
) -> list[float]:
    """Logprobs of all tokens except each document's first, at temperature 1, packed into one row."""
    placed = place(batch_of(*documents), head_weight(model).device)
    logprobs = policy_logprobs(model, placed, compute_dtype)[0]
    return logprobs[placed.row.loss_places].tolist()


def batch_of(*documents: list[int]) -> Batch:
    """A batch for scoring only: each document's first token is its prompt."""
    lengths = torch.tensor([len(ids) for ids in documents])
    starts = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    total = int(starts[-1])
    mask = torch.ones(total)
    mask[starts[:-1]] = 0
    owners = torch.arange(len(documents)).repeat_interleave(lengths)
    return Batch(
        token_ids=torch.tensor([i for ids in documents for i in ids]),
        position_ids=torch.arange(total) - starts[owners],
        document_ids=owners,
        cu_seqlens=starts.int(),
        loss_mask=mask,
        advantages=torch.zeros(total),
        rollout_logprobs=torch.zeros(total),
        temperature=1.0,
        num_loss_tokens=total - len(documents),
        num_rollouts=len(documents),
        answer_starts=(1,) * len(documents),
        digests=("",) * len(documents),
    )


def head_weight(model: PreTrainedModel) -> torch.Tensor:
    """`[vocabulary, hidden]`"""
    return model.get_output_embeddings().weight  # type: ignore[union-attr,return-value]


def softcap(model: PreTrainedModel) -> float | None:
    """The bound on the final logits, if the architecture has one."""
    return getattr(text_config(model.config), "final_logit_softcapping", None)


def text_config(config: Any) -> Any:
    """The config of the language model inside a multimodal model, or the config itself."""
    return config.get_text_config(decoder=True)


def max_context_tokens(config: Any) -> int:
    """The context of the language model, limited to the range of one set of rotary frequencies.

    "longrope" and "dynamic" choose the frequencies by the longest position in the input. Beyond that range a document's
    logprobs would depend on what is packed with it, and a sampled token on how long the answer becomes.
    """
    inner = text_config(config)
    longest = int(getattr(inner, "max_position_embeddings", None) or 4096)
    given = getattr(inner, "rope_parameters", None) or {}
    ropes = [given, *(rope for rope in given.values() if isinstance(rope, Mapping))]  # some have one per layer type
    limits = [
        int(rope.get("original_max_position_embeddings") or longest)
        for rope in ropes
        if rope.get("rope_type") == "longrope"
    ]
    return min([longest, *limits])


R = TypeVar("R")

ALIGNMENT = 16
"""In elements: every tensor starts where a kernel may load whole words."""


def to_device(record: R, device: torch.device) -> R:
    """The same dataclass with its tensors on `device`, including those of nested dataclasses.

    All tensors of a dtype move in one transfer: separate transfers cost more than their bytes. A batch's `cu_seqlens`
    stays on the CPU, where documents are counted and split.
    """
    if device.type == "cpu":
        return record
    tensors: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            tensors[id(tensor)] = tensor
        return tensor

    _with_tensors(record, note)
    moved: dict[int, torch.Tensor] = {}
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        some = {key: tensor for key, tensor in tensors.items() if tensor.dtype == dtype}
        padded = [torch.nn.functional.pad(t.reshape(-1), (0, -t.numel() % ALIGNMENT)) for t in some.values()]
        pieces = torch.cat(padded).to(device).split([len(tensor) for tensor in padded])
        moved |= {key: p[: t.numel()].view(t.shape) for (key, t), p in zip(some.items(), pieces, strict=True)}
    return _with_tensors(record, lambda tensor: moved.get(id(tensor), tensor))


def _with_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same value with each tensor changed, except a batch's `cu_seqlens`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_with_tensors(each, change) for each in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    names = [field.name for field in dataclasses.fields(value) if field.name != "cu_seqlens"]
    return replace(value, **{name: _with_tensors(getattr(value, name), change) for name in names})


MAX_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits per chunk, in float32: 64 MB and 512 MB."""
KEPT_BYTES_ON_CPU = 1 << 28
"""Most bytes of logit gradients that the forward pass keeps on a CPU."""
KEPT_SHARE_OF_GPU = 1 / 8
"""The same on a GPU, as a share of its memory."""


def kept_bytes(device: torch.device) -> int:
    """Most bytes of logit gradients that the forward pass keeps on this device."""
    if device.type == "cuda":
        return int(KEPT_SHARE_OF_GPU * torch.cuda.get_device_properties(device).total_memory)
    return KEPT_BYTES_ON_CPU


def logits_of(hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None = None) -> torch.Tensor:
    """Logits in float32 (float64 for a float64 model). Trainer and engines share this function so that they round
    alike; only an engine's packed head on a CPU differs."""
    return capped(exact_product(hidden, weight.t()), softcap)


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def token_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob, entropy) of each row's target. The products are in `hidden`'s precision, their sums in float32."""
    keeps = torch.is_grad_enabled()  # inside the Function it is always off
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperature, softcap, keeps)  # type: ignore[return-value]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, softcap, keeps):
        cast = weight.to(hidden.dtype)
        rows_at_a_time = _rows_at_a_time(weight)
        kept = hidden.new_empty(_num_kept(hidden, weight, rows_at_a_time) if keeps else 0, len(weight))
        made = []
        for start in range(0, max(1, len(hidden)), rows_at_a_time):  # one pass even if there are no rows
            rows = slice(start, start + rows_at_a_time)
            logits = logits_of(hidden[rows], cast, softcap)
            made.append(
                _softmax(logits, targets[rows], temperature, softcap, kept[rows] if start < len(kept) else None)
            )
        logprobs, entropy = (torch.cat(values) for values in zip(*made, strict=True))
        ctx.save_for_backward(hidden, weight, targets)
        ctx.kept = kept  # not a saved tensor: `model/memory.py` would count its bytes for every token
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, *gradients):
        hidden, weight, targets = ctx.saved_tensors
        cast = weight.to(hidden.dtype)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight, dtype=exact_dtype(weight.dtype)) if ctx.needs_input_grad[1] else None
        arriving = gradients[0][:, None]
        for rows, of_logits in _logit_gradients(ctx, hidden, cast, targets):
            hidden_gradient[rows] = (of_logits @ cast) * arriving[rows]
            if weight_gradient is not None:
                weight_gradient += exact_product(of_logits.t(), (hidden[rows] * arriving[rows]).to(hidden.dtype))
            del of_logits  # before the next chunk is made
        return (
            hidden_gradient,
            None if weight_gradient is None else weight_gradient.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _logit_gradients(
    ctx: Any, hidden: torch.Tensor, cast: torch.Tensor, targets: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor]]:
    """(rows, their d logprob / d logits): first the kept rows, whose memory is then released, then chunk by chunk."""
    kept, ctx.kept = ctx.kept, cast[:0]
    if len(kept):
        yield slice(0, len(kept)), kept
    rows_at_a_time, num_kept = _rows_at_a_time(cast), len(kept)
    del kept
    for start in range(num_kept, len(hidden), rows_at_a_time):
        rows = slice(start, start + rows_at_a_time)
        logits = logits_of(hidden[rows], cast, ctx.softcap)
        made = cast.new_empty(logits.shape)
        _softmax(logits, targets[rows], ctx.temperature, ctx.softcap, made)
        yield rows, made


def _softmax(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, softcap: float | None, into: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob, entropy) of each row; writes d logprob / d logits = (one-hot target − probability) / T to `into`."""
    if logits.is_cuda and logits.dtype == torch.float32 and len(logits) and has_triton():
        from podium.model.softmax_kernel import softmax_rows  # needs Triton

        return softmax_rows(logits, targets, temperature, softcap, into)
    scaled = logits / temperature
    normaliser = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets[:, None])[:, 0] - normaliser
    probabilities = (scaled - normaliser[:, None]).exp_()
    entropy = normaliser - (probabilities * scaled).sum(-1)
    if into is not None:
        made = probabilities.neg_()
        made[torch.arange(len(made), device=made.device), targets] += 1
        made /= temperature
        into.copy_(made if softcap is None else made * (1 - (logits / softcap) ** 2))
    return logprobs, entropy


def _rows_at_a_time(weight: torch.Tensor) -> int:
    return max(1, MAX_CHUNK_ELEMENTS[weight.device.type] // len(weight))


def _num_kept(hidden: torch.Tensor, weight: torch.Tensor, rows_at_a_time: int) -> int:
    """Number of rows to keep: all, or whole chunks."""
    most = kept_bytes(weight.device) // (len(weight) * hidden.element_size())
    return len(hidden) if len(hidden) <= most else most // rows_at_a_time * rows_at_a_time


# Matrix products whose sums are not rounded. In autocast a product of bfloat16 factors is summed in float32 and then
# rounded to bfloat16. If the result is used in float32, the rounding gains nothing and makes sampler and trainer
# differ: for logits, for gradients of float32 weights, and for what attention and the MLP add to the residual stream.
# Inside the MLP, rounding saves memory and time.

EXACT_NAMES = frozenset({"o_proj", "down_proj"})
"""Layers that write to the residual stream, as Llama, Qwen, Gemma, Mistral and similar models call them. Exact sums in
gate_proj and up_proj too were measured on SmolLM2-135M: a sixth more time and 58 % more memory per step."""


def products_dtype(precision: str | None, weights: torch.dtype) -> torch.dtype | None:
    """The dtype of matrix products for `trainer.precision`, to which autocast rounds their factors; None: the weights'.

    Weights in bfloat16 are multiplied in bfloat16, with autocast too: the residual stream is then float32.
    """
    return torch.bfloat16 if precision == "bfloat16" or weights == torch.bfloat16 else None


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 if the factors are float64."""
    return torch.promote_types(dtype, torch.float32)


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, `[n, k] x [k, m]`, in the precision of its sums."""
    if a.is_cuda and a.dtype == torch.bfloat16:
        return torch.mm(a, b, out_dtype=torch.float32)
    exact = exact_dtype(a.dtype)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(exact) @ b.to(exact)


class ExactLinear(torch.nn.Linear):
    """Computes `exact_linear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return exact_linear(input, self.weight, self.bias)


def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In autocast: factors are rounded as usual, their sum and the bias stay float32. Else a plain linear layer."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return torch.nn.functional.linear(x, weight, bias)  # by its full name, because DeepSpeed replaces it
    product = _Product.apply(x.to(torch.get_autocast_dtype(kind)), weight)
    return product if bias is None else product + bias  # type: ignore[return-value,operator]


class _Product(torch.autograd.Function):
    """Incoming gradients are rounded to the factors' precision, as in autocast; the weight's own gradient is not."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return exact_product(_rows(x), weight.to(x.dtype).t()).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, *gradients):
        x, weight = ctx.saved_tensors
        arriving = _rows(gradients[0].to(x.dtype))
        of_x = (arriving @ weight.to(x.dtype)).view_as(x) if ctx.needs_input_grad[0] else None
        of_weight = exact_product(arriving.t(), _rows(x)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def is_plain_linear(layer: object) -> TypeGuard[torch.nn.Linear]:
    """Whether the layer is torch's or ours: libraries that quantise weights make subclasses."""
    return type(layer) in (torch.nn.Linear, ExactLinear)


class ExactEmbedding(torch.nn.Embedding):
    """In autocast the embeddings of bfloat16 weights are float32: the residual stream begins with them."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        found = super().forward(input)
        return found.float() if torch.is_autocast_enabled(found.device.type) else found


def keep_exact_sums(model: PreTrainedModel) -> None:
    """Keeps the residual stream in float32 where autocast is on: layers that write to it do not round their sums.

    Each layer keeps its place, its name and its weights.
    """
    for path, layer in model.named_modules():
        if path.rpartition(".")[2] in EXACT_NAMES and type(layer) is torch.nn.Linear:
            layer.__class__ = ExactLinear
    embeddings = model.get_input_embeddings()
    if type(embeddings) is torch.nn.Embedding and embeddings.weight.dtype == torch.bfloat16:
        embeddings.__class__ = ExactEmbedding
