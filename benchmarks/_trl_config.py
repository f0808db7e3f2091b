"""TRL's settings for the work that both comparisons measure: the fastest found, and nothing that Podium does not do."""

from typing import Any


def trl_config(output: str, num_steps: int, **others: Any) -> Any:
    """One update per batch, the mean over the step's tokens, no KL, nothing recomputed, saved or logged."""
    from trl import GRPOConfig

    settings = {
        "output_dir": output,
        "max_steps": num_steps,
        "num_iterations": 1,
        "beta": 0.0,
        "loss_type": "dapo",  # the mean over the step's tokens, as Podium's default
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "disable_dropout": True,
        "mask_truncated_completions": False,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return GRPOConfig(**settings | others)
