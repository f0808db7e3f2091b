"""What reports say of a run as a whole, from its settings alone: a page can be made while the run is elsewhere."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_card(tables: Mapping[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """`tables` are the resolved settings, as settings.toml has them; `steps` may be fewer than they say."""
    run, model, loss, trainer = (_section(tables, name) for name in ("run", "model", "loss", "trainer"))
    lora = model.get("lora")
    facts = {
        "model": model.get("name"),
        "weights": f"LoRA r {lora.get('r')}" if isinstance(lora, Mapping) else "full",
        "loss": loss.get("name"),
        "prompts/step": run.get("prompts_per_step"),
        "rollouts/prompt": run.get("rollouts_per_prompt"),
        "lr": trainer.get("lr"),
        "seed": run.get("seed"),
    }
    title = f"{run.get('name')}: {loss.get('name')} on {model.get('name')}"
    return {"title": title, "folder": str(folder), "steps": steps, "facts": facts}


def _section(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty where settings.toml has something else there: it may have been edited by hand."""
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}
