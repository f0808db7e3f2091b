"""A prompt computed once for its group gives the logprobs and gradients of a prompt computed for every answer."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.model.attention import row_of
from podium.model.forward import place
from podium.pack import Document
from podium.records import Prompt, Rollout
from tests.model.test_attention import SHAPES, a_batch, a_model, logprobs_of

GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=4
)
"""(prompt length, answer lengths) of each group."""


def documents_of(groups: list[tuple[int, list[int]]]) -> list[Document]:
    made = []
    for ordinal, (length, answers) in enumerate(groups):
        prompt = Prompt(ordinal, tuple((5 * ordinal + 3 * i) % 47 + 3 for i in range(length)))
        for index, count in enumerate(answers):
            ids = tuple((11 * ordinal + 7 * index + 2 * i) % 47 + 3 for i in range(count))
            made.append(Document(prompt, Rollout(ids, (0.0,) * count, (1,) * count, "stop", "", 0, 0, 0, 0, ""), 1.0))
    return made


def in_float64(model):
    """The model with norms that do not go down to float32 on the way, as transformers' do."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            eps = getattr(module, "variance_epsilon", None) or module.eps
            module.forward = partial(exact_norm, module, eps, "Gemma" in type(module).__name__)
    return model


def exact_norm(module, eps: float, adds_one: bool, states: torch.Tensor) -> torch.Tensor:
    scaled = states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + eps)
    return scaled * (module.weight + 1 if adds_one else module.weight)


def gradients(model, documents, weights: torch.Tensor, *, shared_prefix: bool) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    logprobs = logprobs_of(model, documents, shared_prefix=shared_prefix)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@settings(max_examples=25, deadline=None)
@given(groups=GROUPS, shape=st.sampled_from(sorted(SHAPES)))
def test_logprobs_and_gradients_are_those_of_the_plain_row(groups: list[tuple[int, list[int]]], shape: str) -> None:
    """Float64, with a sliding window shorter than the prompts for gemma3; a random weight on every token."""
    model = in_float64(a_model(shape))
    documents = documents_of(groups)
    weights = torch.rand(sum(map(len, documents)), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, plain_gradient = gradients(model, documents, weights, shared_prefix=False)
    shared, shared_gradient = gradients(model, documents, weights, shared_prefix=True)
    assert float((plain - shared).abs().max()) < 1e-9
    assert float((plain_gradient - shared_gradient).abs().max()) < 1e-9
    assert float(plain_gradient.abs().max()) > 0


def test_the_row_holds_a_prompt_once() -> None:
    """Prompts of 4 and 2 tokens, answers of 3 + 1 and 5: 4 + 3 + 1 + 2 + 5 tokens instead of 4 + 3 + 4 + 1 + 2 + 5."""
    batch = a_batch(documents_of([(4, [3, 1]), (2, [5])]))
    row = row_of(batch, shared_prefix=True)
    assert len(row.token_ids) == 15
    assert len(row_of(batch).token_ids) == len(batch.token_ids) == 19
    assert row.segments.query_starts.tolist() == [0, 4, 7, 8, 10, 15]
    assert row.segments.key_starts.tolist() == [0, 4, 11, 16, 18, 25]
    assert row.states.tolist() == [3, 4, 5, 3, 9, 10, 11, 12, 13]  # both first answers read the prompt's last state


def test_what_an_answer_says_does_not_reach_its_siblings() -> None:
    """Changing one answer changes no logprob of the others that share its prompt."""
    model = a_model("llama")
    documents = documents_of([(5, [6, 4])])
    other = Document(documents[0].prompt, documents_of([(5, [1, 6])])[1].rollout, 1.0)
    before = logprobs_of(model, documents, shared_prefix=True)
    after = logprobs_of(model, [other, documents[1]], shared_prefix=True)
    assert torch.equal(before[-4:], after[-4:])
    assert not torch.equal(before[5:11], after[5:11])


def test_a_half_of_a_batch_still_shares_what_is_left() -> None:
    batch = a_batch(documents_of([(4, [3, 1, 2]), (2, [5])]))
    half = batch.documents(1, 3)
    placed = place(half, torch.device("cpu"), shared_prefix=True)
    assert len(placed.row.token_ids) == 4 + 1 + 2


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_padding_at_most_doubles_what_a_table_holds(shared_prefix: bool) -> None:
    """One document of 400 tokens among 60 short ones would make a table of 61 · 400 by itself."""
    batch = a_batch(documents_of([(3, [397])] + [(2, [3, 5, 9])] * 20))
    segments = row_of(batch, shared_prefix=shared_prefix).segments
    cells = sum(table.count * table.longest_key for table in segments.tables)
    keys = int(segments.key_starts[-1])
    assert keys <= cells < 2 * keys
    assert sorted(torch.cat([table.queries for table in segments.tables]).tolist()) == list(
        range(int(segments.query_starts[-1]))
    )
