"""The optimizer step of TRL's GRPOTrainer on the same rollouts: its own loss, padding and accumulation.

TRL pads all answers of a step to the longest one and goes through them `micro_batch` rows at a time. Generation is
left out: what it would have produced is handed to the trainer's loss.
"""

import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from podium.records import Group


class TrlStep:
    """`seconds` runs one step: every micro-batch forward and backward, the gradient clipped, AdamW."""

    def __init__(self, model: Any, groups: Sequence[Group], *, micro_batch: int, bfloat16: bool) -> None:
        import trl
        from datasets import Dataset

        self._micro_batch = micro_batch
        longest = max(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
        on_cuda = next(model.parameters()).is_cuda
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._trainer = trl.GRPOTrainer(
                model=model,
                processing_class=_a_tokenizer(),
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=trl.GRPOConfig(
                    output_dir=tempfile.mkdtemp(),
                    max_completion_length=longest,
                    num_generations=len(groups[0].rollouts),
                    per_device_train_batch_size=max(micro_batch, len(groups[0].rollouts)),
                    learning_rate=1e-6,
                    loss_type="dapo",
                    bf16=bfloat16,
                    use_cpu=not on_cuda,
                    gradient_checkpointing=False,
                    report_to="none",
                ),
                train_dataset=Dataset.from_list([{"prompt": "a"}] * max(micro_batch, len(groups[0].rollouts))),
            )
        self._trainer.current_gradient_accumulation_steps = 1  # as its own loop would set it
        self._trainer.create_optimizer()
        self._inputs = _padded(groups, longest, next(model.parameters()).device)

    def seconds(self) -> float:
        trainer, started = self._trainer, time.perf_counter()
        trainer.model.train()
        total = self._inputs["completion_mask"].sum()
        for first in range(0, len(self._inputs["prompt_ids"]), self._micro_batch):
            part = {name: tensor[first : first + self._micro_batch] for name, tensor in self._inputs.items()}
            with trainer.compute_loss_context_manager():
                loss = trainer._compute_loss(trainer.model, part | {"num_items_in_batch": total})
            trainer.accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started


def _padded(groups: Sequence[Group], longest: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What TRL's generation hands to its loss: prompts on the left, answers padded to the longest of the step."""
    rows = [(group.prompt, rollout, advantage) for group in groups for rollout, advantage in _pairs(group)]
    prompts = torch.tensor([prompt.token_ids for prompt, _, _ in rows])  # all of one length here
    answers, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for number, (_, rollout, _) in enumerate(rows):
        answers[number, : len(rollout.token_ids)] = torch.tensor(rollout.token_ids)
        mask[number, : len(rollout.token_ids)] = 1
    made = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": answers,
        "completion_mask": mask,
        "advantages": torch.tensor([advantage for _, _, advantage in rows]),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def _pairs(group: Group):
    return zip(group.rollouts, group.advantages, strict=True)


def _a_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b")
