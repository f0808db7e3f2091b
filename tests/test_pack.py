import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.model.attention import row_of
from podium.pack import best_fit, even_bins, pack
from podium.records import Batch, Group, Prompt, Rollout, ids_digest


def a_rollout(ids: tuple[int, ...], logprob: float = -0.5) -> Rollout:
    return Rollout(ids, (logprob,) * len(ids), (1,) * len(ids), "stop", "", 0, 0, 0, 0, ids_digest(ids))


def a_group(ordinal: int, prompt: tuple[int, ...], answers: list[tuple[int, ...]], advantages: list[float]) -> Group:
    return Group(
        Prompt(ordinal, prompt),
        tuple(a_rollout(ids) for ids in answers),
        rewards=(1.0,) * len(answers),
        advantages=tuple(advantages),
    )


def test_packing_by_hand() -> None:
    # prompt 7 8, answers (1) and (2 3): documents 7 8 1 | 7 8 2 3
    [batch] = pack([a_group(0, (7, 8), [(1,), (2, 3)], [1.0, -1.0])], max_tokens_per_batch=100, temperature=0.7)
    assert batch.token_ids.tolist() == [7, 8, 1, 7, 8, 2, 3]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert batch.document_ids.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 7]
    assert batch.loss_mask.tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert batch.advantages.tolist() == [0, 0, 1, 0, 0, -1, -1]
    assert batch.rollout_logprobs.tolist() == [0, 0, -0.5, 0, 0, -0.5, -0.5]
    assert (batch.num_loss_tokens, batch.num_rollouts, batch.temperature) == (3, 2, 0.7)
    assert batch.answer_starts == (2, 2)


def test_totals_are_of_the_whole_step_in_every_batch() -> None:
    batches = pack([a_group(0, (7,), [(1, 2), (3, 4, 5)], [1.0, -1.0])], max_tokens_per_batch=4, temperature=1.0)
    assert len(batches) == 2
    assert {(batch.num_loss_tokens, batch.num_rollouts) for batch in batches} == {(5, 2)}


def test_a_document_longer_than_the_limit_is_a_batch_of_its_own() -> None:
    batches = pack([a_group(0, (7,), [(1,) * 9, (2,)], [1.0, -1.0])], max_tokens_per_batch=4, temperature=1.0)
    assert sorted(len(batch.token_ids) for batch in batches) == [2, 10]


def test_a_rollout_without_reward_is_not_trained() -> None:
    group = a_group(0, (7,), [(1,), (2,), (3,)], [1.0, 0.0, -1.0])
    group = Group(group.prompt, group.rollouts, rewards=(1.0, None, 0.0), advantages=group.advantages)
    [batch] = pack([group], max_tokens_per_batch=100, temperature=1.0)
    assert batch.token_ids.tolist() == [7, 1, 7, 3]
    assert batch.num_rollouts == 2


def test_nothing_to_pack_gives_no_batch() -> None:
    assert pack([], max_tokens_per_batch=10, temperature=1.0) == []


def test_best_fit_fills_the_fullest_bin_that_has_room() -> None:
    # longest first: 6 opens a bin (4 left), 5 opens one (5 left), 4 fits the first exactly, 3 the second, 2 the second
    assert best_fit([2, 6, 3, 5, 4], room=10) == [[1, 4], [0, 2, 3]]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=60), room=st.integers(1, 60))
def test_packing_drops_nothing_and_keeps_to_the_limit(lengths: list[int], room: int) -> None:
    bins = best_fit(lengths, room)
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= room or len(bin_) == 1 for bin_ in bins)


def test_documents_of_a_batch_can_be_taken_out() -> None:
    [batch] = pack(
        [a_group(0, (7, 8), [(1,), (2, 3), (4,)], [1.0, 0.5, -1.0])], max_tokens_per_batch=99, temperature=1.0
    )
    part = batch.documents(1, 3)
    assert part.token_ids.tolist() == [7, 8, 2, 3, 7, 8, 4]
    assert part.document_ids.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert part.cu_seqlens.tolist() == [0, 4, 7]
    assert (part.num_loss_tokens, part.num_rollouts, part.num_documents) == (4, 3, 2)


def test_digests_survive_packing() -> None:
    [batch] = pack([a_group(0, (7,), [(1, 2), (3,)], [1.0, -1.0])], max_tokens_per_batch=99, temperature=1.0)
    assert batch.digests == (ids_digest((1, 2)), ids_digest((3,)))
    assert ids_digest((1, 2)) != ids_digest((2, 1))
    assert torch.is_tensor(batch.token_ids)


@pytest.mark.parametrize("limit", [5, 9, 30, 1000])
def test_every_document_is_whole_whatever_the_limit(limit: int) -> None:
    groups = [a_group(i, (7,) * (i + 1), [(1,) * (j + 1) for j in range(4)], [1.0] * 4) for i in range(3)]
    batches = pack(groups, max_tokens_per_batch=limit, temperature=1.0)
    found = sorted(
        int(end - start)
        for batch in batches
        for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    )
    assert found == sorted(i + 1 + j + 1 for i in range(3) for j in range(4))


def test_minibatches_hold_whole_groups_and_know_their_own_totals() -> None:
    groups = [a_group(i, (7,), [(1,) * (i + 1)] * 2, [1.0, -1.0]) for i in range(3)]
    batches = pack(groups, max_tokens_per_batch=99, temperature=1.0, minibatches=2)
    # groups 0 and 2: 2·1 + 2·3 loss tokens; group 1: 2·2
    assert [(batch.minibatch, batch.num_rollouts, batch.num_loss_tokens) for batch in batches] == [(0, 4, 8), (1, 2, 4)]


def test_fewer_groups_than_minibatches_make_fewer_updates() -> None:
    batches = pack(
        [a_group(0, (7,), [(1,), (2,)], [1.0, -1.0])], max_tokens_per_batch=99, temperature=1.0, minibatches=3
    )
    assert [batch.minibatch for batch in batches] == [0]


def lengths_of(batch: Batch) -> list[int]:
    return (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).tolist()


def is_spare(batch: Batch) -> bool:
    return not batch.loss_mask.any()


def test_one_long_and_two_short_documents_over_three_ranks() -> None:
    # a packer that fills one rank after the other ends with two batches here, too few for three ranks, and drops both
    assert even_bins([100, 1, 1], room=100, ranks=3, at_least=2) == [[0], [1], [2]]
    assert even_bins([100, 1, 1], room=50, ranks=3, at_least=2) == [[0], [1], [2]]


def test_ranks_get_about_equal_tokens_by_hand() -> None:
    # longest first into the emptiest of two: 6 | 5, 4 to the second (9), 3 to the first (9), 2 to the first (11)
    assert even_bins([6, 5, 4, 3, 2], room=20, ranks=2, at_least=1) == [[0, 3, 4], [1, 2]]
    # 11 tokens do not fit into 10, so two batches each: 6 | 5 | 4 | 3, 2 (5). First the two fullest, 6 and 5; then the
    # 5 of documents 3 and 4 to the second rank, which holds less, and the 4 to the first: 10 tokens each
    assert even_bins([6, 5, 4, 3, 2], room=10, ranks=2, at_least=2) == [[0], [1], [2], [3, 4]]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=60), room=st.integers(1, 120), ranks=st.integers(1, 9), data=st.data()
)
def test_ranks_share_evenly_drop_nothing_and_keep_to_the_limit(lengths, room, ranks, data) -> None:
    at_least = data.draw(st.integers(min(1, len(lengths)), len(lengths)))
    bins = even_bins(lengths, room, ranks, at_least)
    assert sorted(index for bin_ in bins for index in bin_) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in bin_) <= room or len(bin_) == 1 for bin_ in bins)
    assert len(bins) % ranks == 0
    assert len(bins) >= at_least
    assert sum(not bin_ for bin_ in bins) < ranks  # no round of nothing but spare batches
    tokens = [sum(lengths[i] for bin_ in bins[rank::ranks] for i in bin_) for rank in range(ranks)]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


@settings(max_examples=100, deadline=None)
@given(
    answers=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), max_size=6),
    limit=st.integers(1, 80),
    ranks=st.integers(2, 5),
    minibatches=st.integers(1, 3),
)
def test_every_rank_has_as_many_batches_in_every_update(answers, limit, ranks, minibatches) -> None:
    groups = [
        a_group(number, (7, 8), [(number,) * length for length in lengths], [1.0] * len(lengths))
        for number, lengths in enumerate(answers)
    ]
    sizes = {"max_tokens_per_batch": limit, "temperature": 1.0, "minibatches": minibatches}
    alone, shared = pack(groups, **sizes), pack(groups, **sizes, ranks=ranks)
    updates = [[batch.minibatch for batch in shared[rank::ranks]] for rank in range(ranks)]
    assert all(update == updates[0] for update in updates)
    assert set(updates[0]) == {batch.minibatch for batch in alone}
    for number in set(updates[0]):
        one = [batch for batch in alone if batch.minibatch == number]
        other = [batch for batch in shared if batch.minibatch == number]
        trained = [batch for batch in other if not is_spare(batch)]
        assert sorted(n for batch in one for n in lengths_of(batch)) == sorted(
            n for b in trained for n in lengths_of(b)
        )
        assert {(b.num_loss_tokens, b.num_rollouts) for b in other} == {(one[0].num_loss_tokens, one[0].num_rollouts)}
        assert all(sum(lengths_of(b)) <= limit or b.num_documents == 1 for b in other)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12), limit=st.integers(1, 80))
def test_one_rank_has_the_batches_of_best_fit(lengths: list[int], limit: int) -> None:
    groups = [a_group(0, (7,), [(n,) * length for n, length in enumerate(lengths)], [1.0] * len(lengths))]
    batches = pack(groups, max_tokens_per_batch=limit, temperature=1.0, ranks=1)
    expected = best_fit([length + 1 for length in lengths], limit)
    assert [lengths_of(batch) for batch in batches] == [[lengths[i] + 1 for i in bin_] for bin_ in expected]


def test_a_spare_batch_is_a_copy_of_the_shortest_document_without_a_loss_token() -> None:
    group = a_group(0, (7, 8), [(1, 2, 3), (4,)], [1.0, -1.0])
    batches = pack([group], max_tokens_per_batch=99, temperature=1.0, ranks=3)
    assert [batch.token_ids.tolist() for batch in batches] == [[7, 8, 1, 2, 3], [7, 8, 4], [7, 8, 4]]
    assert [is_spare(batch) for batch in batches] == [False, False, True]
    assert [(batch.num_loss_tokens, batch.num_rollouts) for batch in batches] == [(4, 2)] * 3
    assert batches[2].digests == (ids_digest((4,)),)
    assert batches[2].advantages.abs().sum() == batches[2].rollout_logprobs.abs().sum() == 0


def test_nothing_to_pack_gives_no_rank_a_batch() -> None:
    assert pack([], max_tokens_per_batch=10, temperature=1.0, ranks=3) == []


def test_answers_of_one_prompt_stay_together_and_their_prompt_counts_once() -> None:
    """A prompt of 4 and answers of 3 take 4 + 3·3 = 13 tokens instead of 21; a fourth would need 16."""
    groups = [a_group(n, (7, 8, 9, 6), [(1, 2, 3)] * 4, [1.0, -1.0, 0.5, -0.5]) for n in range(2)]
    batches = pack(groups, max_tokens_per_batch=13, temperature=1.0, shared_prefix=True)
    assert sorted(batch.ordinals for batch in batches) == [(0,), (0, 0, 0), (1,), (1, 1, 1)]
    assert all(len(row_of(batch, shared_prefix=True).token_ids) <= 13 for batch in batches)
    assert sum(batch.num_documents for batch in batches) == 8
    roomy = pack(groups, max_tokens_per_batch=32, temperature=1.0, shared_prefix=True)
    assert [batch.ordinals for batch in roomy] == [(0,) * 4 + (1,) * 4]  # 2 · (4 + 4·3) = 32
