"""The global random states as tensors: torch's (CPU and CUDA), Python's and NumPy's.

Podium's own sampling does not use them; dropout and user code may.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_all(seed: int) -> None:
    """Seeds every global generator, so that nothing from before the run has an effect."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.manual_seed(seed)


def random_state() -> dict[str, torch.Tensor]:
    version, words, gauss = random.getstate()
    assert version == 3
    numpy_state: Any = np.random.get_state()
    _, keys, position, has_gauss, cached = numpy_state
    states = {
        "random.torch": torch.get_rng_state(),
        "random.python": torch.tensor(words, dtype=torch.int64),
        "random.python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "random.numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "random.numpy_gauss": torch.tensor(cached, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Leaves every global generator as it was: around checks that are not made in every process of a run."""
    states = random_state()
    try:
        yield
    finally:
        set_random_state(states)


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["random.torch"].clone())
    gauss = states["random.python_gauss"].tolist()
    random.setstate((3, tuple(states["random.python"].tolist()), gauss[0] if gauss else None))
    *keys, position, has_gauss = states["random.numpy"].tolist()
    cached = float(states["random.numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if "random.cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["random.cuda"].clone())
