"""TRL's GRPOTrainer as an independent oracle: same model, same answers, same old logprobs; loss and gradient agree.

TRL pads and runs one row a rollout, Podium packs; so this also compares the whole forward pass. TRL's conventions: its
"grpo" averages per rollout, its cispo has an absolute upper bound and no lower one.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.loss.cispo import cispo
from podium.loss.dapo import dapo
from podium.loss.grpo import grpo
from podium.loss.gspo import gspo
from podium.loss.objective import Objective
from podium.model.forward import place, policy_logprobs
from podium.model.load import load_policy
from podium.pack import Document, to_batch
from podium.records import Batch, Prompt, Rollout
from podium.settings.tables import Model

trl = pytest.importorskip("trl", reason="TRL is not installed (extra benchmark)")

ANSWERS = ["37 + 48 = 85\n#### 85", "37 + 48 = 86", "1", "37 + 48 = 84\n#### 86"]
ADVANTAGES = [1.5, -0.5, -1.25, 0.25]
MAX_NEW_TOKENS = 24
CASES: dict[str, tuple[dict[str, Any], Objective]] = {
    "grpo": ({"loss_type": "grpo", "epsilon": 0.2}, Objective(grpo, average="rollouts")),
    "dapo": ({"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28}, Objective(dapo)),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon": 0.2},
        Objective(grpo, average=MAX_NEW_TOKENS),
    ),
    "gspo": (
        {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, "importance_sampling_level": "sequence"},
        Objective(gspo, average="rollouts"),
    ),
    "gspo, wide": (
        {"loss_type": "grpo", "epsilon": 0.3, "epsilon_high": 0.3, "importance_sampling_level": "sequence"},
        Objective(lambda p, o, b: gspo(p, o, b, clip=0.3), average="rollouts"),
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.28},
        Objective(lambda p, o, b: cispo(p, o, b, clip=("none", 0.28))),
    ),
    "grpo with kl": (
        {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.1, "use_bias_correction_kl": False},
        Objective(grpo, average="rollouts", kl_beta=0.1),
    ),
}


@pytest.fixture(scope="module")
def policy() -> Any:
    return load_policy(Model.model_validate({"device": "cpu", "lora": False}), seed=0)


def perturbed(values: torch.Tensor, mask: torch.Tensor, seed: int) -> torch.Tensor:
    """Other logprobs near these: ratios on both sides of every clip bound."""
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed))
    return (values.detach() + 0.4 * noise) * mask


def our_batch(policy: Any) -> Batch:
    encode = policy.tokenizer.encode
    prompt = Prompt(0, tuple(encode("<s>What is 37 + 48?\n")))
    documents = []
    for text, advantage in zip(ANSWERS, ADVANTAGES, strict=True):
        ids = (*encode(text), policy.tokenizer.eos_token_id)
        rollout = Rollout(ids, (0.0,) * len(ids), (1,) * len(ids), "stop", text, 0, 0, 0, 0, "")
        documents.append(Document(prompt, rollout, advantage))
    tokens = sum(len(document.rollout.token_ids) for document in documents)
    batch = to_batch(documents, num_loss_tokens=tokens, num_rollouts=4, temperature=1.0)
    with torch.no_grad():
        logprobs = policy_logprobs(policy.model, place(batch, policy.device))[0]
    old, reference = (perturbed(logprobs, batch.loss_mask, seed) for seed in (1, 2))
    return Batch(**{**batch.__dict__, "old_logprobs": old, "reference_logprobs": reference})


def padded(batch: Batch, flat: torch.Tensor) -> torch.Tensor:
    """A flat tensor's answer tokens as TRL's `[rollouts, longest]`, padded on the right."""
    rows = [
        flat[int(batch.cu_seqlens[n]) + start : int(batch.cu_seqlens[n + 1])]
        for n, start in enumerate(batch.answer_starts)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def trl_loss(policy: Any, batch: Batch, options: dict[str, Any], tmp_path: Path) -> torch.Tensor:
    from datasets import Dataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.GRPOTrainer(
            model=policy.model,
            processing_class=policy.tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=trl.GRPOConfig(
                output_dir=str(tmp_path),
                max_completion_length=MAX_NEW_TOKENS,
                num_generations=4,
                per_device_train_batch_size=4,
                use_cpu=True,
                bf16=False,
                report_to="none",
                gradient_checkpointing=False,
                **options,
            ),
            train_dataset=Dataset.from_list([{"prompt": "x"}] * 4),
        )
    trainer.model.eval()
    prompts = torch.tensor([batch.token_ids[: batch.answer_starts[0]].tolist()] * 4)
    mask = padded(batch, batch.loss_mask)
    return trainer._compute_loss(
        policy.model,
        {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": padded(batch, batch.token_ids),
            "completion_mask": mask.long(),
            "advantages": torch.tensor(ADVANTAGES),
            "old_per_token_logps": padded(batch, batch.old_logprobs),
            "ref_per_token_logps": padded(batch, batch.reference_logprobs),
            "num_items_in_batch": mask.sum(),
        },
    )


def gradients(policy: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    policy.model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_of_trl(name: str, policy: Any, tmp_path: Path) -> None:
    options, objective = CASES[name]
    batch = our_batch(policy)
    ours = objective(policy_logprobs(policy.model, place(batch, policy.device))[0], batch).loss
    our_gradients = gradients(policy, ours)
    theirs = trl_loss(policy, batch, options, tmp_path)
    their_gradients = gradients(policy, theirs)
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-5)
    assert max(float(g.abs().max()) for g in our_gradients.values()) > 1e-3 or name == "gspo"
    for parameter, gradient in our_gradients.items():
        assert torch.allclose(gradient, their_gradients[parameter], atol=1e-5), parameter
