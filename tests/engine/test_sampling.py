import pytest
import torch

from podium.engine.decoding import sampling as module
from podium.engine.decoding.sampling import RowSampling, block_masses, draw, draw_likeliest, kind_of, uniform
from podium.records import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def draw_by_block(logits, seeds, indices, temperature: float):
    each = torch.full((len(logits),), temperature)
    return module.draw_by_block(logits, block_masses(logits, each), seeds, indices, each)


def draw_as(logits, seeds, indices, *samplings: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """One sampling for all rows, or one for each."""
    rows = samplings * len(logits) if len(samplings) == 1 else samplings
    return draw(logits, seeds, indices, RowSampling.of(rows, torch.device("cpu")), kind_of(rows))


def many(sampling: Sampling, count: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    return draw_as(LOGITS.expand(count, -1), torch.arange(count), torch.zeros(count, dtype=torch.long), sampling)


def test_each_row_draws_by_its_own_sampling() -> None:
    """Rows of different samplings in one batch draw what they draw in a batch of their own."""
    samplings = [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(temperature=0),
        Sampling(top_k=2),
        Sampling(top_p=0.7),
        Sampling(top_k=3, top_p=0.8, temperature=1.5),
        Sampling(temperature=0, top_k=1, top_p=0.1),
    ]
    rows = [samplings[k % len(samplings)] for k in range(700)]
    logits = 2 * torch.randn(700, 40, generator=torch.Generator().manual_seed(1))
    seeds, zeros = torch.arange(700), torch.zeros(700, dtype=torch.long)
    ids, logprobs = draw_as(logits, seeds, zeros, *rows)
    for place, sampling in enumerate(samplings):
        of_it = torch.arange(place, 700, len(samplings))
        alone_ids, alone = draw_as(logits[of_it], seeds[of_it], zeros[of_it], sampling)
        assert torch.equal(ids[of_it], alone_ids)
        assert torch.allclose(logprobs[of_it], alone, atol=1e-6)


def test_rows_may_have_different_numbers_of_stop_ids() -> None:
    samplings = [Sampling(stop_ids=(1, 2, 3)), Sampling(stop_ids=(4,)), Sampling(7)]
    both = RowSampling.of(samplings, torch.device("cpu")).select(torch.tensor([2, 0]))
    assert both.stop_ids.tolist() == [[-1, -1, -1], [1, 2, 3]]
    assert both.limit.tolist() == [7, 256]


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    numbers = uniform(torch.arange(100_000) * 7919, torch.zeros(100_000, dtype=torch.long))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers.float(), bins=20, min=0, max=1)
    # 5,000 per bin expected, standard deviation √(5000·0.95) = 69: five of them is 345
    assert (counts - 5000).abs().max() < 345


def test_uniform_numbers_of_one_seed_are_not_correlated_between_positions() -> None:
    numbers = torch.stack([uniform(torch.arange(50_000), torch.full((50_000,), i)) for i in range(3)])
    correlation = torch.corrcoef(numbers)
    assert (correlation - torch.eye(3)).abs().max() < 0.02  # 1/√50,000 = 0.0045


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_distribution(temperature: float) -> None:
    ids, _ = many(Sampling(temperature=temperature))
    expected = (LOGITS / temperature).softmax(-1)
    frequencies = torch.bincount(ids, minlength=4) / len(ids)
    assert torch.allclose(frequencies, expected, atol=0.02)


def test_logprobs_are_of_the_distribution_sampled_from() -> None:
    for sampling in (Sampling(temperature=0.7), Sampling(top_k=2), Sampling(top_p=0.7)):
        ids, logprobs = many(sampling)
        frequencies = torch.bincount(ids, minlength=4) / len(ids)
        for token in ids.unique():
            stated = logprobs[ids == token][0].exp()
            assert frequencies[token] == pytest.approx(float(stated), abs=0.02)


def test_top_k_keeps_the_k_likeliest() -> None:
    ids, logprobs = many(Sampling(top_k=2))
    assert set(ids.tolist()) == {0, 1}
    # renormalised over two: log(e²/(e²+e)) = −0.31326
    assert logprobs[ids == 0][0].item() == pytest.approx(-0.31326, abs=1e-4)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    # probabilities 0.644, 0.237, 0.087, 0.032: 0.644 < 0.7 ≤ 0.881, so two tokens; 0.5 is reached by the first alone
    assert set(many(Sampling(top_p=0.7))[0].tolist()) == {0, 1}
    assert set(many(Sampling(top_p=0.5))[0].tolist()) == {0}


@pytest.mark.parametrize("top_p", [1e-46, 1e-300, 5e-324])
def test_a_top_p_that_is_0_in_float32_keeps_the_likeliest(top_p: float) -> None:
    ids, logprobs = many(Sampling(top_p=top_p), count=100)
    assert set(ids.tolist()) == {0}
    assert logprobs.tolist() == [0.0] * 100


def test_greedy_takes_the_likeliest() -> None:
    ids, logprobs = many(Sampling(temperature=0), 10)
    assert ids.tolist() == [0] * 10
    assert logprobs[0].item() == pytest.approx(float(LOGITS.log_softmax(-1)[0]))


def test_a_draw_depends_on_its_own_seed_and_position_only() -> None:
    seeds, zero = torch.arange(64), torch.zeros(64, dtype=torch.long)
    together, _ = draw_as(LOGITS.expand(64, -1), seeds, zero, Sampling())
    torch.manual_seed(123)  # no global generator is used
    alone = [draw_as(LOGITS[None], seeds[i : i + 1], zero[:1], Sampling())[0].item() for i in range(64)]
    assert together.tolist() == alone
    later, _ = draw_as(LOGITS.expand(64, -1), seeds, zero + 1, Sampling())
    assert later.tolist() != together.tolist()


def chi_square(ids: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * len(ids)
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vocabulary", [8, 24, 20])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draws_by_block_pass_a_chi_square_test(vocabulary: int, temperature: float, monkeypatch) -> None:
    """One block, several, and a vocabulary that no width divides; 40,000 draws."""
    monkeypatch.setattr(module, "BLOCK_WIDTH", 8)
    logits = torch.linspace(-1.5, 1.5, vocabulary)[
        torch.randperm(vocabulary, generator=torch.Generator().manual_seed(3))
    ]
    count = 40_000
    seeds, zeros = torch.arange(count) * 7919, torch.zeros(count, dtype=torch.long)
    ids, logprobs = draw_by_block(logits.expand(count, -1), seeds, zeros, temperature)
    expected = (logits / temperature).softmax(-1)
    # Wilson and Hilferty: the 0.9999 quantile of chi-square with k degrees of freedom
    k = vocabulary - 1
    limit = k * (1 - 2 / (9 * k) + 3.719 * (2 / (9 * k)) ** 0.5) ** 3
    assert chi_square(ids, expected) < limit
    assert torch.allclose(logprobs, expected.log()[ids], atol=1e-5)


def test_draws_by_block_are_those_of_plain_drawing() -> None:
    """The same random numbers give the same ids, but for rounding at the edge of two."""
    logits = 3 * torch.randn(2000, 1000, generator=torch.Generator().manual_seed(5))
    seeds, indices = torch.arange(2000), torch.arange(2000) % 7
    ids, logprobs = draw_by_block(logits, seeds, indices, 0.8)
    expected_ids, expected = draw_as(logits, seeds, indices, Sampling(temperature=0.8))
    same = ids == expected_ids
    assert same.sum() >= 1998
    assert torch.allclose(logprobs[same], expected[same], atol=1e-4)


def test_ids_without_probability_are_never_drawn_by_block(monkeypatch) -> None:
    monkeypatch.setattr(module, "BLOCK_WIDTH", 4)
    logits = torch.full((5000, 12), -torch.inf)
    logits[:, [1, 6]] = 0.0
    ids, logprobs = draw_by_block(logits, torch.arange(5000), torch.zeros(5000, dtype=torch.long), 1.0)
    assert set(ids.tolist()) == {1, 6}
    assert torch.allclose(logprobs, torch.tensor(0.5).log(), atol=1e-6)


def test_the_likeliest_is_that_of_greedy_drawing() -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(5))
    ids, logprobs = draw_likeliest(logits)
    zeros = torch.zeros(50, dtype=torch.long)
    expected_ids, expected = draw_as(logits, zeros, zeros, Sampling(temperature=0))
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(logprobs, expected, atol=1e-5)
