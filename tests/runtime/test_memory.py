"""The memory plan: what it adds up, what it decides where the settings leave it open, and that it is kept to."""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from podium.check import verdicts as check
from podium.cli import main
from podium.errors import InputError
from podium.model import attention, memory
from podium.model.fused import SAVED_SHARE
from podium.model.load import Policy, load_policy
from podium.model.memory import available_bytes, cache_elements_per_token, saved_bytes_per_token
from podium.run import build
from podium.run.build import check_space
from podium.run.folder import RunFolder
from podium.runtime.wiring import memory as memory_module
from podium.runtime.wiring.memory import LEAST_TOKENS, MOST_TOKENS, memory_plan, most_tokens
from podium.settings.tables import Settings
from tests.conftest import small_tables
from tests.families import config_of


def settings_of(tmp_path: Path, **tables: dict[str, Any]) -> Settings:
    made = small_tables(tmp_path / "run")
    for section, values in tables.items():
        made[section] = {**made.get(section, {}), **values}
    return Settings.model_validate(made)


def policy_of(settings: Settings) -> Policy:
    return load_policy(settings.model, seed=0)


def parameters_of(policy: Policy, *, trained: bool) -> int:
    return sum(p.numel() for p in policy.model.parameters() if p.requires_grad or not trained)


@pytest.mark.parametrize("lora", [False, {}])
def test_what_is_held_is_counted(lora: Any, tmp_path: Path) -> None:
    settings = settings_of(tmp_path, model={"lora": lora}, rollout={"max_new_tokens": 10})
    policy = policy_of(settings)
    plan = memory_plan(settings, policy, longest_prompt=20)
    assert plan.weights == 4 * parameters_of(policy, trained=False)
    assert plan.trained == 4 * parameters_of(policy, trained=True)
    assert plan.optimizer == pytest.approx(2 * plan.trained, rel=0.01)  # and a count a parameter
    assert (plan.engine_copy > 0) == (lora is not False)
    slots = settings.run.prompts_per_step * settings.run.rollouts_per_prompt
    config: Any = policy.model.config
    head_dim = config.hidden_size // config.num_attention_heads
    assert plan.cache == slots * 30 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4
    assert plan.longest_document == 30


@pytest.mark.parametrize(
    ("tokens", "dtype", "longest_prompt", "kept"),
    [
        (256, "float32", 20, 256 * 100 * 4),
        (256, "float32", 3000, 3010 * 100 * 4),  # a document that is longer than a batch is one by itself
        (256, "bfloat16", 20, 256 * 100 * 2),
        (1 << 20, "float32", 20, 1 << 28),  # the most that is kept
    ],
)
def test_what_is_kept_of_the_logits_is_counted(tokens, dtype, longest_prompt, kept, tmp_path: Path) -> None:
    settings = settings_of(
        tmp_path,
        run={"prompts_per_step": 10_000},
        model={"dtype": dtype},
        rollout={"max_new_tokens": 10},
        pack={"max_tokens_per_batch": tokens},
    )
    policy = policy_of(settings)
    assert policy.model.config.vocab_size == 100
    assert memory_plan(settings, policy, longest_prompt).logits == 3 * 4 * (1 << 24) + kept


def test_bytes_a_token_grow_with_the_layers(tmp_path: Path) -> None:
    """Half the layers keep about half; what stands outside the layers is kept once."""
    policy = policy_of(settings_of(tmp_path, model={"lora": False}))
    whole = saved_bytes_per_token(policy, None)
    hidden = policy.model.config.hidden_size
    policy.model.get_decoder().layers = policy.model.get_decoder().layers[:1]
    half = saved_bytes_per_token(policy, None)
    assert 0.3 * whole < half < 0.7 * whole
    assert half > 4 * 8 * hidden  # at least the inputs of its products: norms, queries, keys, values, output, gate, up


@pytest.mark.parametrize(("gigabytes", "checkpointing"), [(100.0, False), (0.3, True)])
def test_the_budget_follows_the_device(gigabytes: float, checkpointing: bool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(memory_module, "device_bytes", lambda device: int(gigabytes * 1e9))
    settings = settings_of(tmp_path, model={"lora": False})
    plan = memory_plan(settings, policy_of(settings), longest_prompt=20)
    assert plan.gradient_checkpointing is checkpointing
    if checkpointing:
        assert plan.max_tokens_per_batch < 16384
        assert plan.per_token < saved_bytes_per_token(policy_of(settings), None)
    else:
        assert plan.max_tokens_per_batch == 16384
        assert plan.total < gigabytes * 1e9


def test_on_a_gpu_a_batch_of_a_large_model_is_smaller() -> None:
    assert most_tokens("cuda", 6 * 135_000_000) == MOST_TOKENS["cuda"]
    assert most_tokens("cuda", 6 * 600_000_000) == 41_666
    assert most_tokens("cuda", 6 * 1_700_000_000) == 14_705
    assert most_tokens("cuda", 6 * 70_000_000_000) == LEAST_TOKENS
    assert most_tokens("cpu", 6 * 1_700_000_000) == MOST_TOKENS["cpu"]


def test_given_numbers_are_kept(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, pack={"max_tokens_per_batch": 777}, trainer={"gradient_checkpointing": True})
    plan = memory_plan(settings, policy_of(settings), longest_prompt=20)
    assert (plan.max_tokens_per_batch, plan.gradient_checkpointing) == (777, True)


def test_a_batch_holds_the_longest_document(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(memory_module, "device_bytes", lambda device: 1)
    settings = settings_of(tmp_path)
    plan = memory_plan(settings, policy_of(settings), longest_prompt=5 * LEAST_TOKENS)
    assert plan.max_tokens_per_batch == plan.longest_document > 5 * LEAST_TOKENS


def test_check_says_that_it_does_not_fit(tmp_path: Path, monkeypatch, capsys) -> None:
    import tomli_w

    tables = small_tables(tmp_path / "run")
    (tmp_path / "run.toml").write_text(tomli_w.dumps(tables))
    assert main(["check", str(tmp_path / "run.toml")]) == 0
    assert "too much" not in capsys.readouterr().out
    monkeypatch.setattr(memory_module, "device_bytes", lambda device: 1_000_000)
    assert main(["check", str(tmp_path / "run.toml")]) == 2
    assert "too much" in capsys.readouterr().out


def test_half_precision_keeps_less(tmp_path: Path) -> None:
    policy = policy_of(settings_of(tmp_path, model={"lora": False}))
    assert saved_bytes_per_token(policy, torch.bfloat16) < saved_bytes_per_token(policy, None)


def test_references_snapshots_and_slots_are_counted(tmp_path: Path) -> None:
    plain = settings_of(tmp_path, model={"lora": False})
    policy = policy_of(plain)
    base = memory_plan(plain, policy, longest_prompt=20)
    assert (base.reference, base.engine_copy) == (0, 0)
    kept = settings_of(tmp_path, model={"lora": False, "reference": "initial"}, loss={"kl_beta": 0.1})
    assert memory_plan(kept, policy, longest_prompt=20).reference == base.trained
    late = settings_of(tmp_path, model={"lora": False}, run={"sync_every": 2})
    assert memory_plan(late, policy, longest_prompt=20).engine_copy == base.trained
    few = settings_of(tmp_path, model={"lora": False}, engine={"concurrency": 4})
    assert memory_plan(few, policy, longest_prompt=20).cache == base.cache // 4  # of 16 rollouts


def test_on_cuda_a_prompts_cache_is_counted_once_for_its_group_and_in_the_trainers_precision(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(memory_module, "device_bytes", lambda device: int(1e11))
    plain, half = (settings_of(tmp_path, trainer={"precision": name}) for name in ("float32", "bfloat16"))
    policy = replace(policy_of(plain), device=torch.device("cuda"))
    config: Any = policy.model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads
    per_token *= config.hidden_size // config.num_attention_heads
    others = 2 * 4 * 16 * config.vocab_size + (16 + 1) * (12 * 64 + 4 * 3)  # logits; ids, logprobs, page numbers
    tokens = (1 + 16 + 4 * 2 + 2) * 64  # pages: the spare one, 16 rollouts', 4 prompts', two for growth
    assert memory_module._cache(plain, policy, 100, 24).most == 4 * tokens * per_token + others
    assert memory_module._cache(half, policy, 100, 24).most == 2 * tokens * per_token + others
    assert memory_module._cache(half, policy, 100, 24).least < 2 * tokens * per_token + others
    weights = sum(p.numel() for p in policy.twin.parameters())
    assert memory_module._engine_copy(half, policy, trained=0) == 2 * weights


@pytest.mark.parametrize("megabytes", [20, 40, 80, 160, 100_000])
def test_on_cuda_training_gets_what_it_needs_and_keys_and_values_what_is_left(
    megabytes: int, tmp_path: Path, monkeypatch
) -> None:
    """On a large device, what the run can need; on a small one, at least enough to write a few rollouts."""
    monkeypatch.setattr(memory_module, "device_bytes", lambda device: megabytes * 1_000_000)
    monkeypatch.setattr(memory_module, "available_bytes", lambda device: megabytes * 1_000_000)
    monkeypatch.setattr(memory_module, "kept_bytes", lambda device: 0)
    monkeypatch.setitem(memory_module.MAX_CHUNK_ELEMENTS, "cuda", 1)
    settings = settings_of(
        tmp_path, run={"prompts_per_step": 64, "rollouts_per_prompt": 8}, rollout={"max_new_tokens": 1000}
    )
    policy = replace(policy_of(settings), device=torch.device("cuda"))
    monkeypatch.setattr(memory_module, "saved_bytes_per_token", lambda policy, dtype: 5000.0)
    plan, need = memory_plan(settings, policy, 100), memory_module._cache(settings, policy, 100, 1000)
    assert need.least <= plan.cache <= need.most
    assert plan.max_tokens_per_batch >= LEAST_TOKENS or plan.gradient_checkpointing
    assert plan.cache <= plan.cache_limit
    assert plan.total <= 0.8 * plan.device or plan.cache == need.least
    if megabytes == 100_000:
        assert (plan.cache, plan.max_tokens_per_batch) == (need.most, MOST_TOKENS["cuda"])
    elif plan.cache > need.least:
        assert plan.cache < need.most
        assert plan.cache == plan.cache_limit
    assert plan == memory_plan(settings, policy, 100)


def test_compiled_layers_are_planned_with_their_share(tmp_path: Path, monkeypatch) -> None:
    settings = settings_of(tmp_path)
    policy = policy_of(settings)
    whole = memory_plan(settings, policy, longest_prompt=20).per_token
    monkeypatch.setattr(memory_module, "is_compiled", lambda model: True)
    assert memory_plan(settings, policy, longest_prompt=20).per_token == SAVED_SHARE * whole


def test_over_a_base_in_bfloat16_an_engine_copies_only_the_adapter(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, model={"dtype": "bfloat16"})
    plan = memory_plan(settings, policy_of(settings), longest_prompt=20)
    assert plan.engine_copy == plan.trained


@pytest.mark.parametrize(("every", "checkpoints"), [(0, 1), (50, 2), (1, 4)])
def test_a_disk_needs_room_for_as_many_checkpoints_as_there_will_be(
    every: int, checkpoints: int, tmp_path: Path, monkeypatch
) -> None:
    settings = settings_of(tmp_path, run={"steps": 100}, checkpoint={"every": every, "keep": 3})
    plan = memory_plan(settings, policy_of(settings), longest_prompt=20)
    needed = checkpoints * (plan.trained + plan.optimizer) + plan.trained
    remedy = "make room, lower checkpoint.keep, or" if every == 1 else "make room, or"
    wanted = f": {checkpoints} checkpoint{'s' * (checkpoints > 1)} of .*; {remedy}"
    for free in (needed, needed - 1):
        monkeypatch.setattr(build.shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        refused = pytest.raises(InputError, match=wanted) if free < needed else nullcontext()
        with refused:
            check_space(settings, RunFolder(tmp_path / "run"), plan)


def test_a_resumed_run_needs_only_the_room_that_its_checkpoints_do_not_have(tmp_path: Path, monkeypatch) -> None:
    """Where an unbroken run fits, so does one that was stopped."""
    settings = settings_of(tmp_path, run={"steps": 100}, checkpoint={"every": 1, "keep": 3})
    plan = memory_plan(settings, policy_of(settings), longest_prompt=20)
    each, folder = plan.trained + plan.optimizer, RunFolder(tmp_path / "run")
    for name in ("step-000001", "step-000002", "step-000003", "aside-step-000004-1", "step-000005.tmp-1"):
        (folder.checkpoints / name).mkdir(parents=True)
        with (folder.checkpoints / name / "trainer.safetensors").open("wb") as file:
            file.truncate(each)
    left = {None: 4 * each + plan.trained - 4 * each, 2: 4 * each + plan.trained - 3 * each}
    for step, needed in left.items():
        needed = max(each, needed)
        for free in (needed, needed - 1):
            monkeypatch.setattr(build.shutil, "disk_usage", lambda place, free=free: SimpleNamespace(free=free))
            short = pytest.raises(InputError, match="GB more than it has already, the disk has")
            with short if free < needed else nullcontext():
                check_space(settings, folder, plan, step)


def test_what_other_programs_hold_is_not_there_for_a_run(tmp_path: Path, monkeypatch) -> None:
    """Of 10 GB the process holds 1, the machine can give 4 more, and a container with a limit 2: the least counts."""
    monkeypatch.setattr(memory, "device_bytes", lambda device: 10_000_000_000)
    page = os.sysconf("SC_PAGE_SIZE")
    files = {
        "OWN_PAGES": f"5000 {1_000_000_000 // page} 20\n",
        "MEMORY_NOW": "MemTotal: 9765625 kB\nMemFree: 1 kB\nMemAvailable: 3906250 kB\n",
        "CGROUP_LIMIT": "max\n",
        "CGROUP_USED": "6000000000\n",
        "CGROUP_USE": "anon 5000000000\nactive_file 300000000\ninactive_file 700000000\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(memory, name, tmp_path / name)
    own = 1_000_000_000 // page * page
    assert available_bytes(torch.device("cpu")) == own + 4_000_000_000
    (tmp_path / "CGROUP_LIMIT").write_text("7000000000\n")
    assert available_bytes(torch.device("cpu")) == own + 2_000_000_000  # 7 − 6 + 1 of files that can be given up
    for name in files:
        monkeypatch.setattr(memory, name, tmp_path / "missing")
    assert available_bytes(torch.device("cpu")) == 10_000_000_000  # no Linux: nothing is known


def test_check_compares_with_what_is_available_and_names_bfloat16(tmp_path: Path, monkeypatch, capsys) -> None:
    import tomli_w

    (tmp_path / "run.toml").write_text(tomli_w.dumps(small_tables(tmp_path / "run")))
    monkeypatch.setattr(memory_module, "available_bytes", lambda device: 100_000)
    assert main(["check", str(tmp_path / "run.toml")]) == 2
    out = capsys.readouterr().out
    assert "of 100 kB, which is what other programs leave of" in out
    assert "problem: too much for what other programs leave: end some of them, lower engine.concurrency" in out
    assert "set model.dtype = 'bfloat16', which halves the weights too, or trainer.precision = 'bfloat16'" in out


def test_a_batch_is_counted_with_the_tokens_that_a_step_can_have(tmp_path: Path) -> None:
    """4 prompts × 4 rollouts of 44 tokens are 704, however many a batch might hold."""
    settings = settings_of(tmp_path, pack={"max_tokens_per_batch": 16384})
    plan = memory_plan(settings, policy_of(settings), longest_prompt=20)
    assert plan.max_tokens_per_batch == 16384
    assert plan.largest_batch == plan.tokens_per_step == 704
    held = sum(getattr(plan, name) for name in memory_module.HELD)
    assert plan.total == held + 704 * plan.per_token
    small = settings_of(tmp_path, pack={"max_tokens_per_batch": 256})
    assert memory_plan(small, policy_of(small), longest_prompt=20).largest_batch == 256
    assert memory_plan(small, policy_of(small), longest_prompt=400).largest_batch == 424  # a document is never cut


def test_check_says_on_a_gpu_that_everything_is_float32(tmp_path: Path) -> None:

    def notes(device: str, **tables: dict[str, Any]) -> list[str]:
        made = small_tables(tmp_path / "run")
        changed = {section: {**made.get(section, {}), **values} for section, values in tables.items()}
        said = check._settings_notes(Settings.from_dict(made | changed), device)
        return [note for note in said if "float32" in note]

    assert notes("cuda") == []  # model.dtype = "auto"
    for float32 in ({"model": {"dtype": "float32"}}, {"trainer": {"precision": "float32"}}):
        [with_adapter] = notes("cuda", **float32)
        assert "matrix products are in float32, without TF32" in with_adapter
        assert "set model.dtype = 'bfloat16', which halves the weights too" in with_adapter
    [with_all_weights] = notes("cuda", model={"lora": False})
    assert with_all_weights.endswith("set trainer.precision = 'bfloat16'")
    assert notes("cpu") == []
    assert notes("cuda", trainer={"precision": "bfloat16"}) == []
    assert notes("cuda", model={"dtype": "bfloat16"}) == []


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("llama", 2 * 2 * 2 * 8),  # layers × keys and values × heads × width
        ("deepseek_v3", 2 * (16 + 4)),  # a latent of 16 numbers for all heads, and 4 that are turned
        ("gemma4_text", 2 * 2 * 8 + 2 * 2 * 16),  # the second layer's heads are twice as wide
        ("gemma3", 2 * 2 * 2 * 8),  # a wrapper: the numbers are the text model's
    ],
)
def test_the_cache_is_counted_as_the_layers_fill_it(name: str, numbers: int) -> None:
    model = AutoModelForCausalLM.from_config(config_of(name), attn_implementation=attention.NAME).eval()
    assert cache_elements_per_token(model) == numbers
