"""AdamW in 8 bits: what it costs, that it follows AdamW, that its state comes back whole, and who is refused it."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from podium.cli import main
from podium.errors import CheckpointError, InputError
from podium.trainer import (
    check_optimizer,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
    state_bytes,
)
from tests.trainer.test_single import a_trainer, step

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
CPU = torch.device("cpu")


def some_parameters(device: str = "cpu") -> dict[str, torch.nn.Parameter]:
    """A large tensor whose last block is not full, and a small one."""
    random = torch.Generator().manual_seed(0)
    shapes = {"large": (70, 100), "small": (50,)}
    return {name: torch.nn.Parameter(torch.randn(s, generator=random).to(device)) for name, s in shapes.items()}


def on_its_device(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return whole.to(parameter.device)


def walk(
    name: str, steps: int, *, device: str = "cpu", resume_at: int | None = None
) -> tuple[torch.optim.Optimizer, dict[str, torch.nn.Parameter]]:
    """Steps along gradients that depend on the step alone; at `resume_at` the optimizer is made anew from its state."""
    parameters = some_parameters(device)
    optimizer = make_optimizer(parameters, name, **OPTIONS)
    for number in range(steps):
        if number == resume_at:
            saved = {key: tensor.cpu().clone() for key, tensor in optimizer_state(optimizer, parameters)}
            optimizer = make_optimizer(parameters, name, **OPTIONS)
            load_optimizer_state(optimizer, parameters, saved, on_its_device)
        random = torch.Generator().manual_seed(number)
        for parameter in parameters.values():
            parameter.grad = torch.randn(parameter.shape, generator=random).to(device)
        optimizer.step()
    return optimizer, parameters


def assert_it_goes_on_bit_for_bit(name: str, device: str) -> None:
    (one, unbroken), (other, resumed) = (walk(name, 5, device=device, resume_at=at) for at in (None, 2))
    assert all(torch.equal(unbroken[key], resumed[key]) for key in unbroken)
    states = dict(optimizer_state(one, unbroken)), dict(optimizer_state(other, resumed))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@needs_bitsandbytes
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_an_optimizer_goes_on_from_its_state_bit_for_bit(name: str) -> None:
    assert_it_goes_on_bit_for_bit(name, "cpu")


def test_a_state_from_before_the_first_step_takes_the_moments_of_later_ones_away() -> None:
    optimizer, parameters = walk("adamw", 2)
    load_optimizer_state(optimizer, parameters, {}, on_its_device)
    assert dict(optimizer_state(optimizer, parameters)) == {}


@needs_bitsandbytes
def test_the_first_step_is_that_of_adamw() -> None:
    """The state is rounded after a step, not before it."""
    exact, eight_bit = (walk(name, 1)[1] for name in ("adamw", "adamw_8bit"))
    assert all(torch.allclose(eight_bit[name], exact[name], atol=1e-6) for name in exact)


@needs_bitsandbytes
def test_later_steps_stay_near_those_of_adamw() -> None:
    """A byte holds a moment to about two digits."""
    before = some_parameters()["large"].detach()
    exact, eight_bit = (walk(name, 20)[1] for name in ("adamw", "adamw_8bit"))
    gap = (eight_bit["large"] - exact["large"]).detach().norm() / (exact["large"].detach() - before).norm()
    assert 0 < float(gap) < 0.1
    assert torch.allclose(eight_bit["small"], exact["small"], atol=1e-6)  # its state has 32 bits


@needs_bitsandbytes
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_the_moments_take_what_the_memory_plan_says(name: str) -> None:
    optimizer, parameters = walk(name, 1)
    slots = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
    held = sum(t.nbytes for key, t in optimizer_state(optimizer, parameters) if key.endswith(slots))
    # 7000 elements: 2 bytes each and two scales for each of 28 blocks; 50 elements: 8 bytes each
    by_hand = {"adamw": 8 * 7050, "adamw_8bit": 2 * 7000 + 2 * 4 * 28 + 8 * 50}
    assert held == state_bytes(name, parameters.values()) == by_hand[name]


@needs_bitsandbytes
@pytest.mark.parametrize("lora", [False, True])
def test_a_restored_8_bit_trainer_goes_on_bit_for_bit(lora: bool, tmp_path: Path) -> None:
    unbroken, restored = (a_trainer(lora=lora, optimizer="adamw_8bit") for _ in range(2))
    for _ in range(3):
        step(unbroken, [[0, 1, 2, 3]])
    save_file(unbroken.state(), tmp_path / "trainer.safetensors")  # plain tensors, nothing pickled
    restored.load_state(load_file(tmp_path / "trainer.safetensors"))
    assert {slots["step"] for slots in restored._optimizer.state.values()} == {3}  # an int again, not a tensor
    for trainer in (unbroken, restored):
        for _ in range(2):
            step(trainer, [[0, 1], [2, 3]])
    one, other = unbroken.state(), restored.state()
    assert any(name.endswith("state1") and tensor.dtype == torch.uint8 for name, tensor in one.items())
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@needs_bitsandbytes
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_a_checkpoint_of_the_other_optimizer_is_refused(name: str) -> None:
    one, other = a_trainer(optimizer=name), a_trainer(optimizer="adamw" if name == "adamw_8bit" else "adamw_8bit")
    step(one, [[0, 1, 2, 3]])
    with pytest.raises(CheckpointError, match=r"trainer\.optimizer"):
        other.load_state(one.state())


@needs_bitsandbytes
def test_tensors_that_are_all_small_have_no_use_for_it() -> None:
    with pytest.raises(InputError, match="no effect"):
        make_optimizer({"small": some_parameters()["small"]}, "adamw_8bit", **OPTIONS)


@needs_bitsandbytes
def test_a_device_that_can_run_it_is_accepted() -> None:
    check_optimizer("adamw_8bit", CPU)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)  # makes Python's own import fail
    with pytest.raises(InputError, match="pip install 'bitsandbytes"):
        check_optimizer("adamw_8bit", CPU)
    check_optimizer("adamw", CPU)


@needs_bitsandbytes
def test_a_device_that_cannot_run_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no kernel image is available\nand more lines")

    monkeypatch.setattr("bitsandbytes.optim.AdamW8bit.step", fail)
    with pytest.raises(
        InputError, match="this bitsandbytes cannot run on cpu: no kernel image is available; try a newer one"
    ):
        check_optimizer("adamw_8bit", CPU)


@pytest.mark.parametrize("command", ["train", "check"])
def test_it_is_refused_before_the_model_is_loaded(command, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim.adamw", None)
    settings = tmp_path / "run.toml"
    settings.write_text('[trainer]\noptimizer = "adamw_8bit"\n[model]\nname = "/no/such/model"\ndevice = "cpu"\n')
    assert main([command, str(settings), f"--run.folder={tmp_path / 'run'}"]) == 2
    assert "trainer.optimizer = 'adamw_8bit' needs a package" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
