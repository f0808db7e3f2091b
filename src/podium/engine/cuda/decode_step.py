"""The decode step of the CUDA engine: one token more for each row of a batch, all of it on the device.

The tokens drawn last go through a twin of the model whose attention reads keys and values from pages; the next tokens
are drawn and recorded, each row by its own sampling. On CUDA the layers are compiled and the step is captured as a CUDA
graph for each batch size of the ladder, so the host only replays it; elsewhere it runs as it is written. Nothing in a
step depends on a value that the host would have to wait for.

Attention is registered with transformers under the name "podium_decode". In: one query, key and value per row of the
batch, and where the row's other keys are: those of its prompt, whose pages all rollouts of a group share, then its own,
which the new one joins. Out: attention over just these, up to their lengths. On CUDA by a kernel that reads nothing
else; the plain form is for devices without Triton. The pages lie on the attention modules themselves, as buffers
`paged_keys`, `paged_values` `[pages, PAGE, heads, head_dim]`: so compiled layers share one piece of code, since nothing
in it depends on a layer's number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from podium.engine.cuda.roster import PAGE, SPARE_PAGE, ladder, pages_for, reserved_pages
from podium.engine.decoding.linear import apart, join_products
from podium.engine.decoding.sampling import Kind, RowSampling, block_masses, draw, draw_by_block, draw_likeliest
from podium.model.attention import window_of
from podium.model.device_thread import SHARED
from podium.model.forward import head_weight, logits_of, softcap
from podium.model.fused import compile_layers, fused_on_cuda
from podium.model.load import twin_of
from podium.records import Request, Sampling

NAME = "podium_decode"
CACHES = ("paged_keys", "paged_values")
STOP_STEP = 8
"""Room for stop ids is made in steps, and room for tokens in whole pages, so that requests of about the same size use
the same captured steps."""
COMPILER = {"combo_kernels": True, "triton.autotune_pointwise": False}
"""For batches of one token per row, whose kernels are short. Kernels that could run side by side become one (rotary
embeddings of queries and of keys), and no kernel is chosen by timing it with cold caches, since here they are warm."""


@dataclass(frozen=True)
class Capacity:
    """What there is room for at the same time."""

    slots: int
    columns: int
    """Longest answer."""
    prompt_columns: int
    """Longest prompt."""
    pages: int
    """For keys and values of all rollouts together, the spare page included."""
    stops: int
    """Most stop ids of a request."""

    @classmethod
    def fitting(
        cls,
        bytes_per_token: int,
        vocabulary: int,
        budget: float,
        *,
        rollouts: int,
        group: int,
        concurrency: int,
        longest: tuple[int, int],
        stops: int,
    ) -> Capacity:
        """For as many rollouts as may be written at the same time, with the pages that they need at most, or as many as
        `budget` bytes hold; `longest` prompt and answer.

        `bytes_per_token` is what the keys and values of a token take. Where there would not be a page for every slot,
        there are fewer slots.
        """
        prompt_pages, own_pages = map(pages_for, longest)
        stops = max(1, -(-stops // STOP_STEP)) * STOP_STEP
        found = cls(0, 0, 0, 0, 0)
        for slots in reversed(ladder(min(rollouts, concurrency))):
            prompts = -(-slots // group) * (1 if rollouts <= slots else 2)  # stragglers keep theirs while others begin
            pages = 1 + slots * own_pages + max(2, prompts) * prompt_pages + reserved_pages(slots)
            found = cls(slots, own_pages * PAGE, prompt_pages * PAGE, pages, stops)
            left = budget - found.fixed_bytes(vocabulary)
            found = replace(found, pages=int(min(pages, max(1, left / (PAGE * bytes_per_token)))))
            if found.pages > slots + prompt_pages + own_pages:
                break
        return found

    @property
    def table_width(self) -> int:
        """Most pages of a request."""
        return (self.prompt_columns + self.columns) // PAGE

    def holds(self, other: Capacity) -> bool:
        """Whether the tables have room for `other`. Pages do not count: with fewer, rollouts wait for each other."""
        names = ("slots", "columns", "prompt_columns", "stops")
        return all(getattr(self, name) >= getattr(other, name) for name in names)

    def takes(self, request: Request) -> bool:
        """Whether there are pages for this request if it is written alone."""
        return self.pages > pages_for(len(request.token_ids)) + pages_for(request.sampling.max_new_tokens)

    def fixed_bytes(self, vocabulary: int) -> int:
        """Of what does not lie in pages: the logits of a step, twice, since top-k and top-p make others of them, and
        the ids, logprobs and page numbers of the slots."""
        return 2 * 4 * self.slots * vocabulary + (self.slots + 1) * (12 * self.columns + 4 * self.table_width)

    def cache_bytes(self, bytes_per_token: int, vocabulary: int) -> int:
        """Of pages and all the rest."""
        return self.pages * PAGE * bytes_per_token + self.fixed_bytes(vocabulary)


@dataclass(frozen=True)
class SlotState:
    """One row per slot. The last row is a spare slot, for rows of a batch that nobody needs."""

    sampling: RowSampling
    seed: torch.Tensor
    """int64"""
    drawn: torch.Tensor
    """int64, tokens of the answer so far; all except the last have gone through the model."""
    finished: torch.Tensor
    """bool"""
    prompt: torch.Tensor
    """int64, place of the prompt."""
    prompt_length: torch.Tensor
    """int64"""
    ids: torch.Tensor
    """int64 `[slots, columns]`, the answer; valid up to `drawn`."""
    logprobs: torch.Tensor
    """float32 `[slots, columns]`"""

    @classmethod
    def empty(cls, capacity: Capacity, device: torch.device) -> SlotState:
        """All finished with one token drawn, so that any row can go through a step and change nothing."""
        rows, columns = capacity.slots + 1, capacity.columns
        numbers = {"seed": 0, "drawn": 1, "prompt": 0, "prompt_length": 0}
        return cls(
            RowSampling.of([Sampling(max_new_tokens=1)] * rows, device, capacity.stops),
            **{name: torch.full((rows,), value, device=device) for name, value in numbers.items()},
            finished=torch.ones(rows, dtype=torch.bool, device=device),
            ids=torch.zeros(rows, columns, dtype=torch.long, device=device),
            logprobs=torch.zeros(rows, columns, device=device),
        )


@dataclass(frozen=True)
class DecodeRows:
    """Where the keys of each row of the batch are."""

    tables: torch.Tensor
    """int32 `[slots, pages of a request]`: the pages of each slot's prompt, then those of its own tokens, which begin
    on a page of their own."""
    slots: torch.Tensor
    """int64 `[rows]`"""
    lengths: torch.Tensor
    """int64 `[rows]`, own tokens with keys before this step; the new key goes to the next column."""
    prompt_lengths: torch.Tensor
    """int64 `[rows]`"""


def slot_attention(module, query, key, value, attention_mask, decode: DecodeRows, scaling: float, **kwargs):
    """transformers' attention interface: returns `[rows, 1, heads, head_dim]` and no weights."""
    dtype = module.paged_keys.dtype
    own = (tensor[:, :, 0].to(dtype) for tensor in (query, key, value))
    where = (decode.tables, decode.slots, decode.lengths, decode.prompt_lengths)
    window = window_of(module, kwargs) or 0
    return decode_attention(*own, module.paged_keys, module.paged_values, *where, scaling, window)[:, None], None


@torch.library.custom_op("podium::decode_attention", mutates_args=("keys", "values"))
def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    prompt_lengths: torch.Tensor,
    scaling: float,
    window: int,
) -> torch.Tensor:
    """`[rows, heads, head_dim]` for a query of that shape; `window` 0 looks at everything.

    `key` and `value` `[rows, key heads, head_dim]` go to the rows' next columns in the pages `keys` and `values`.
    """
    pages = tables[slots].long()
    first_own = (prompt_lengths + PAGE - 1) // PAGE  # number of the first page that is not the prompt's
    new_page = pages.gather(1, (first_own + lengths // PAGE)[:, None])[:, 0]
    keys[new_page, lengths % PAGE], values[new_page, lengths % PAGE] = key, value
    columns = torch.arange(pages.shape[1] * PAGE, device=query.device)
    own = columns - PAGE * first_own[:, None]
    newest = prompt_lengths + lengths  # position of the query
    positions = torch.where(own < 0, columns, own + prompt_lengths[:, None])
    allowed = (columns < prompt_lengths[:, None]) | ((own >= 0) & (own <= lengths[:, None]))
    if window:
        allowed &= positions > newest[:, None] - window
    keys_of_rows, values_of_rows = (pool[pages].flatten(1, 2).transpose(1, 2) for pool in (keys, values))
    return torch.nn.functional.scaled_dot_product_attention(
        query[:, :, None], keys_of_rows, values_of_rows, allowed[:, None, None], scale=scaling, enable_gqa=True
    )[:, :, 0].contiguous()


@decode_attention.register_kernel("cuda")
def _on_cuda(*args) -> torch.Tensor:
    from podium.engine.cuda.kernels import flash_decode  # needs Triton

    return flash_decode(*args)


@decode_attention.register_fake
def _shape_of_result(query, *others) -> torch.Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


AttentionInterface.register(NAME, slot_attention)


class DecodeStep:
    """The twin of a model with room for `capacity`, and the steps captured so far."""

    def __init__(self, model: PreTrainedModel, capacity: Capacity, compute_dtype: torch.dtype | None) -> None:
        self.capacity, self.compute_dtype = capacity, compute_dtype or model.dtype
        self._device = head_weight(model).device
        self._is_autocast = compute_dtype is not None
        self._model = twin_of(model)
        join_products(self._model)
        self._model.set_attn_implementation(NAME)
        self.layers = attention_modules(self._model)
        self._add_pages()
        self.state = SlotState.empty(capacity, self._device)
        self.tables = torch.full(
            (capacity.slots + 1, capacity.table_width), SPARE_PAGE, dtype=torch.int32, device=self._device
        )
        """The pages of each slot: its prompt's, then its own. Updated in place, since captured steps read it."""
        self.prompt_states = torch.zeros(
            capacity.slots, head_weight(model).shape[1], dtype=self.compute_dtype, device=self._device
        )
        """The hidden state at each prompt's last token, from which first tokens are drawn."""
        self.rows = torch.full((ladder(capacity.slots)[-1],), capacity.slots, device=self._device)
        """The slots of the batch; a step of size n looks at the first n."""
        self._head = head_weight(model).detach().to(self.compute_dtype)
        """The LM head's weights in the step's precision: the model's own, or a copy."""
        self._graphs: dict[tuple[int, Kind], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        if self._device.type == "cuda":
            compile_layers(self._model, COMPILER)

    def _add_pages(self) -> None:
        """Keys and values, on the modules that use them."""
        for module in self.layers:
            shape = (self.capacity.pages, PAGE, module.k_proj.out_features // module.head_dim, module.head_dim)
            for name in CACHES:
                pages = torch.zeros(shape, dtype=self.compute_dtype, device=self._device)
                module.register_buffer(name, pages, persistent=False)

    def take_head(self) -> None:
        """Brings a copy of the LM head's weights up to date."""
        if self._head.data_ptr() != head_weight(self._model).data_ptr():
            self._head.copy_(head_weight(self._model))

    @torch.no_grad()
    def faults(self, model: PreTrainedModel) -> list[str]:
        """Where this reads other weights than those of `model`: elsewhere in memory, or an old copy of the head."""
        own = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        read = [*self._model.named_parameters(), *self._model.named_buffers()]
        strange = [name for name, t in read if name.rpartition(".")[2] not in CACHES and t.data_ptr() not in own]
        strange += apart(model)
        faults = [f"captured decode steps read {name} elsewhere than the engine's model has it" for name in strange]
        if not torch.equal(self._head, head_weight(model).to(self._head.dtype)):
            faults.append("captured decode steps sample with an old copy of the LM head")
        return faults

    def run(self, size: int, kind: Kind) -> None:
        """One token more for the first `size` rows."""
        if self._device.type != "cuda":
            self._step(size, kind)
            return
        if (size, kind) not in self._graphs:
            self._graphs[size, kind] = self._capture(size, kind)
        self._graphs[size, kind].replay()

    def draw_first(self, slots: torch.Tensor, kind: Kind) -> None:
        """The first token of each of these slots, whose prompts have been computed."""
        logits = self._logits(self.prompt_states[self.state.prompt[slots]])
        self._draw_and_record(logits, slots, kind, is_compiled=False)

    def _capture(self, size: int, kind: Kind) -> torch.cuda.CUDAGraph:
        """With spare rows: a captured step leaves every slot as it was. No training meanwhile: compilers and the
        device's random numbers are for one thread at a time."""
        kept = self.rows.clone()
        self.rows.fill_(self.capacity.slots)
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with SHARED.busy:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for each in (size,) if self._graphs else (len(self.rows), size):  # tuned for the largest batch
                    for _ in range(2):  # compiles what is not compiled yet
                        self._step(each, kind)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(size, kind)
        self._pool = graph.pool()  # steps run one after the other, so they share their memory
        self.rows.copy_(kept)
        return graph

    def _step(self, size: int, kind: Kind) -> None:
        rows, state = self.rows[:size], self.state
        lengths = state.drawn[rows] - 1
        where = DecodeRows(self.tables, rows, lengths, state.prompt_length[rows])
        with torch.autocast(self._device.type, dtype=self.compute_dtype, enabled=self._is_autocast):
            hidden = self._model.get_decoder()(
                input_ids=state.ids[rows, lengths][:, None],
                position_ids=(where.prompt_lengths + lengths)[:, None],
                attention_mask=None,
                use_cache=False,
                decode=where,
            ).last_hidden_state[:, -1]
        self._draw_and_record(self._logits(hidden), rows, kind, is_compiled=True)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(hidden.to(self.compute_dtype), self._head, softcap(self._model))

    def _draw_and_record(self, logits: torch.Tensor, slots: torch.Tensor, kind: Kind, *, is_compiled: bool) -> None:
        seeds, indices = self.state.seed[slots], self.state.drawn[slots]
        how = self.state.sampling.select(slots)
        if kind == "greedy":
            ids, logprobs = (_fused_likeliest if is_compiled else draw_likeliest)(logits)
        elif kind == "plain":
            by_block = _fused_by_block if is_compiled else draw_by_block
            masses = (_fast_masses if is_compiled else block_masses)(logits, how.temperature)
            ids, logprobs = by_block(logits, masses, seeds, indices, how.temperature)
        else:
            ids, logprobs = draw(logits, seeds, indices, how, kind)
        add = _fused_record if is_compiled else record
        written = self.state.drawn, self.state.finished, self.state.ids, self.state.logprobs
        add(ids, logprobs, how.stop_ids, slots, how.limit, *written)


def record(ids, logprobs, stop_ids, slots, limit, drawn, finished, all_ids, all_logprobs) -> None:
    """Adds the drawn tokens to the answers that have not ended, and ends those that stop or are full."""
    was_finished, count = finished[slots], drawn[slots]
    place = count - was_finished.long()  # an answer that has ended gets its last token again
    all_ids[slots, place] = torch.where(was_finished, all_ids[slots, place], ids)
    all_logprobs[slots, place] = torch.where(was_finished, all_logprobs[slots, place], logprobs)
    drawn[slots] = place + 1
    finished[slots] = was_finished | (ids[:, None] == stop_ids).any(-1) | (place + 1 >= limit)


_fused_record = fused_on_cuda(record)
_fused_by_block = fused_on_cuda(draw_by_block)
_fused_likeliest = fused_on_cuda(draw_likeliest)


def _fast_masses(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    if not logits.is_cuda:
        return block_masses(logits, temperature)
    from podium.engine.cuda.kernels import block_masses_on_cuda  # needs Triton

    return block_masses_on_cuda(logits, temperature)


def attention_modules(model: PreTrainedModel) -> list[Any]:
    """Of the decoder, in the order of its layers."""
    found = [module for module in model.get_decoder().modules() if hasattr(module, "k_proj")]
    return sorted(found, key=lambda module: module.layer_idx)  # type: ignore[arg-type,return-value]
