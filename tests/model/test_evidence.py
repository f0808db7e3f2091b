"""What an engine shows of its weights, compared with the trainer's."""

import pytest
import torch

from podium.model.evidence import Held, branch_input, branch_views, checksums, difference, shown, weights_digest

LAYERS, WIDTH, SCALE = 400, 512, 2.0


def weights_of(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    made = {}
    for number in range(LAYERS):
        made[f"{number}.lora_A"] = torch.randn(rank, WIDTH, generator=generator)
        made[f"{number}.lora_B"] = torch.randn(64, rank, generator=generator) * 1e-6
    return made


def held_of(weights: dict[str, torch.Tensor], dtype: torch.dtype, scale: float = SCALE) -> Held:
    """As an engine's adapter layers compute, every product rounded to `dtype`."""
    branches = {}
    for number in range(LAYERS):
        a, b = (weights[f"{number}.lora_{half}"].to(dtype) for half in "AB")
        x = branch_input(WIDTH, a.device, dtype)
        branches[str(number)] = branch_views(((x @ a.t()) @ b.t() * scale)[0]).tolist()
    tensors = {name: shown(tensor.to(dtype)) for name, tensor in weights.items()}
    return Held(tensors, dict.fromkeys(branches, SCALE), branches)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 2, 16])
def test_rounding_is_never_taken_for_other_weights(rank: int, dtype: torch.dtype) -> None:
    """With a rank of 1 the inner sum of some of 400 layers nearly cancels out."""
    weights = weights_of(rank)
    assert difference(weights.items(), held_of(weights, dtype), SCALE) is None
    assert difference(weights.items(), held_of(weights, dtype).sealed(), SCALE) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_branch_at_half_scale_is_seen_though_it_says_the_right_one(dtype: torch.dtype) -> None:
    weights = weights_of(16)
    assert "the adapter's branch of 0" in str(difference(weights.items(), held_of(weights, dtype, SCALE / 2), SCALE))


def test_one_bit_changes_a_checksum_and_the_place_counts() -> None:
    tensor = torch.randn(100_003)
    other = tensor.clone()
    other.view(torch.int32)[77_777] ^= 1
    swapped = tensor.clone()
    swapped[[5, 90_000]] = swapped[[90_000, 5]]
    assert len(set(checksums([tensor, other, swapped, tensor[:-1]]))) == 4
    assert checksums([tensor.clone()]) == checksums([tensor])


def test_a_digest_knows_names_shapes_and_types() -> None:
    one = torch.zeros(4)
    told = [("a", one)], [("b", one)], [("a", one.view(2, 2))], [("a", one.to(torch.int32))]
    assert len({weights_digest(weights) for weights in told}) == 4
