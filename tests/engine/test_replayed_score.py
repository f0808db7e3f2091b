"""What a replayed score does where nothing can be captured; tests/gpu has it replayed."""

import warnings

import pytest
import torch

from podium.engine.cuda.replayed_score import ReplayedScore
from podium.model.forward import sequence_logprobs
from tests.engine.test_inprocess import policy


@pytest.mark.skipif(torch.cuda.is_available(), reason="a graph could be captured here")
def test_where_no_graph_can_be_captured_it_says_so_once_and_scores_plainly() -> None:
    text, model = [1 + i % 7 for i in range(20)], policy().model
    expected = sequence_logprobs(model, text)
    score = ReplayedScore(model, None)
    assert score(text) == expected
    with pytest.warns(UserWarning, match="scores the probe without CUDA graphs: "):
        assert score(text) == expected
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score(text) == expected
