import pytest
import torch

from podium.errors import WeightsError
from podium.sync import check_finite


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_no_number_is_found_and_its_tensor_named(value: float) -> None:
    bad = torch.ones(40, 50)
    bad[17, 3] = value
    with pytest.raises(WeightsError, match="second holds values that are not finite numbers at the end"):
        check_finite([("first", torch.ones(3)), ("second", bad), ("third", bad)], "at the end")


def test_infinities_that_would_cancel_are_found() -> None:
    with pytest.raises(WeightsError):
        check_finite([("both", torch.tensor([float("inf"), -float("inf")]))], "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_values_whose_norm_is_too_large_are_no_error(dtype: torch.dtype) -> None:
    large = torch.full((4,), torch.finfo(dtype).max, dtype=dtype)
    assert not large.norm().isfinite()
    check_finite([("large", large), ("small", torch.ones(2))], "")
    check_finite([], "")
