import pytest
import torch

from podium.engine._sampling import draw, uniform
from podium.records import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def many(sampling: Sampling, count: int = 20_000) -> tuple[torch.Tensor, torch.Tensor]:
    return draw(LOGITS.expand(count, -1), torch.arange(count), torch.zeros(count, dtype=torch.long), sampling)


def test_uniform_numbers_are_uniform_and_below_one() -> None:
    numbers = uniform(torch.arange(100_000) * 7919, torch.zeros(100_000, dtype=torch.long))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers.float(), bins=20, min=0, max=1)
    # 5,000 a bin expected, standard deviation √(5000·0.95) = 69: five of them is 345
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


def test_greedy_takes_the_likeliest() -> None:
    ids, logprobs = many(Sampling(temperature=0), 10)
    assert ids.tolist() == [0] * 10
    assert logprobs[0].item() == pytest.approx(float(LOGITS.log_softmax(-1)[0]))


def test_a_draw_depends_on_its_own_seed_and_position_only() -> None:
    seeds, zero = torch.arange(64), torch.zeros(64, dtype=torch.long)
    together, _ = draw(LOGITS.expand(64, -1), seeds, zero, Sampling())
    torch.manual_seed(123)  # no global generator is used
    alone = [draw(LOGITS[None], seeds[i : i + 1], zero[:1], Sampling())[0].item() for i in range(64)]
    assert together.tolist() == alone
    later, _ = draw(LOGITS.expand(64, -1), seeds, zero + 1, Sampling())
    assert later.tolist() != together.tolist()
