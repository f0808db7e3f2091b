"""From `[model]` to a policy: the model that trains, its sampling twin, the tokenizer.

The twin has the same layers over the same tensors, so an engine samples from the trainer's own weights without a second
copy (on a CPU it packs some of them again). The twin differs only in having no LoRA layers and no dropout.
"""

import copy
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from podium.errors import CheckpointError, InputError
from podium.model import attention
from podium.model.device_thread import seed_all
from podium.model.evidence import named_trained, weights_digest
from podium.model.forward import head_weight, is_plain_linear, keep_exact_sums, max_context_tokens, text_config
from podium.model.hub import hub_is_reachable, smollm2_folder
from podium.model.self_check import ADVICE, check_model

# PEFT imports bitsandbytes if it is installed, which then warns about a 4-bit kernel that nothing here uses.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

EMBEDDED = Path(__file__).parent.parent / "assets" / "embedded"
EMBEDDED_TOOLS = EMBEDDED.with_name("embedded_tools")


@dataclass(frozen=True)
class Policy:
    """A loaded model. Under LoRA `model` has adapter layers and only they train."""

    model: PreTrainedModel
    twin: PreTrainedModel
    """Shares every base tensor with `model`; for sampling."""
    tokenizer: Any
    peft: Any
    """The PEFT model around `model`, or None for full weights."""
    stop_ids: tuple[int, ...]
    """Ids that end an answer: the model's and the tokenizer's end of sequence."""
    max_context_tokens: int
    device: torch.device
    source: str
    """Folder or hub name of the base weights."""
    small: PreTrainedModel | None = None
    """A small model of the same architecture, on which engines check themselves; see `self_check`."""
    adapter_scale: float = 0.0
    """alpha / r; 0 without an adapter."""

    @property
    def vocabulary(self) -> int:
        """Number of ids that the model can write; more than the tokenizer has if the embedding table is padded."""
        return head_weight(self.twin).shape[0]  # the model's own may be sharded over ranks

    def separate_twin(self, keep: bool = True) -> None:
        """Gives the twin its own weights, or none at all, before the model's weights are sharded over ranks."""
        for module in self.twin.modules():
            for name, parameter in module.named_parameters(recurse=False):
                own = parameter.detach().clone() if keep else parameter.detach().to("meta")
                setattr(module, name, torch.nn.Parameter(own, requires_grad=False))
        self.twin.tie_weights()

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters, or all, under the names of a checkpoint."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def base_digest(self) -> str | None:
        """A digest of the weights under the adapter, which no checkpoint holds; None for full weights.

        It reads every weight, so call it before they are sharded over ranks.
        """
        if self.peft is None:
            return None
        trained = self.trained_parameters()
        base = ((name, tensor) for name, tensor in self.model.state_dict().items() if name not in trained)
        return weights_digest(base).hex()

    @torch.no_grad()
    def load_trained(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Loads the weights of a checkpoint, which must be those that this model trains."""
        own = self.trained_parameters()
        refuse_other_weights(tensors, {name: parameter.shape for name, parameter in own.items()})
        for name, parameter in own.items():
            parameter.copy_(tensors[f"weights.{name}"])

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that an engine loads, by the names of `named_trained`."""
        return ((name, parameter.detach()) for name, parameter in named_trained(self.model))


@dataclass(frozen=True)
class Reader:
    """What rendering prompts needs from a model, for a process that neither samples nor trains."""

    tokenizer: Any
    max_context_tokens: int


def load_reader(settings: Any) -> Reader:
    """`settings` is the `[model]` section; no weights are read."""
    source = model_folder(settings.name)
    with _load_errors(settings.name):
        config = AutoConfig.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    return Reader(tokenizer, max_context_tokens(config))


def refuse_other_weights(tensors: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Size]) -> None:
    """Raises `CheckpointError` unless a checkpoint's weights have the names and shapes of `mine`."""
    saved = {name.removeprefix("weights."): t.shape for name, t in tensors.items() if name.startswith("weights.")}
    if saved != mine:
        other = sorted(set(saved.items()) ^ set(mine.items()))[0][0]
        raise CheckpointError(f"the checkpoint holds other weights than this model trains, such as {other}")


def load_policy(settings: Any, *, seed: int, weights: Path | None = None) -> Policy:
    """`settings` is the `[model]` section; `weights` is a folder with trained weights or an adapter to start from."""
    transformers_logging.disable_progress_bar()
    seed_all(seed)
    device = choose_device(settings.device)
    is_adapter = weights is not None and (weights / "adapter_config.json").is_file()
    source = str(weights) if weights is not None and not is_adapter else model_folder(settings.name)
    with _load_errors(settings.name):
        model: Any = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=weights_dtype(settings, device),
            attn_implementation=attention.NAME,
            trust_remote_code=settings.trust_remote_code,
            use_safetensors=True,  # never a pickle
        )
        model.to(device)  # type: ignore[arg-type]
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=settings.trust_remote_code)
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise InputError(
            f"model.name = {settings.name!r}: the tokenizer has {len(tokenizer)} tokens and the model {rows}"
        )
    keep_exact_sums(model)
    small = check_model(model, settings.name)
    _warn_of_shorter_context(model.config, settings.name)
    twin = twin_of(model)
    peft, adapter_scale = None, 0.0
    if is_adapter or settings.lora is not False:
        peft = _with_adapter(model, settings.lora, weights if is_adapter else None)
        config = peft.peft_config["default"]
        adapter_scale = config.lora_alpha / config.r
    model.eval()
    return Policy(
        model=model,
        twin=twin,
        tokenizer=tokenizer,
        peft=peft,
        stop_ids=_stop_ids(model, tokenizer),
        max_context_tokens=max_context_tokens(model.config),
        device=device,
        source=source,
        small=small,
        adapter_scale=adapter_scale,
    )


def model_folder(name: str) -> str:
    """The folder of `model.name`'s weights; a hub name is returned as it is."""
    if name == "embedded":
        return str(EMBEDDED)
    if name == "embedded-tools":
        return str(EMBEDDED_TOOLS)
    if name == "smollm2-135m":
        return str(smollm2_folder())
    if not (name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()):
        _refuse_unreachable(name)
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise InputError(f"model.name = {name!r}: no such folder")
    if (folder / "adapter_config.json").is_file():
        raise InputError(f"model.name = {name!r} is a LoRA adapter, not a model; `podium eval` takes it, over its base")
    if not (folder / "config.json").is_file():
        raise InputError(
            f"model.name = {name!r}: no config.json in that folder; give a folder that transformers can load"
        )
    return str(folder)


def _refuse_unreachable(name: str) -> None:
    """Rejects a hub name that is not cached and cannot be reached, at once instead of after a minute of retries."""
    from huggingface_hub import try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str) or hub_is_reachable():
            return
    except ValueError as error:  # no hub can have a model of that name
        raise InputError(f"model.name = {name!r} is neither a folder here nor a valid hub name: {error}") from None
    raise InputError(
        f'model.name = {name!r} is not a folder here, and the model hub cannot be reached; give "embedded", '
        '"smollm2-135m" or a folder with safetensors weights'
    )


def weights_dtype(settings: Any, device: torch.device) -> torch.dtype:
    """`model.dtype` as a torch dtype. "auto" is bfloat16 for weights under an adapter on a GPU, else float32."""
    if settings.dtype != "auto":
        return getattr(torch, settings.dtype)
    return torch.bfloat16 if device.type == "cuda" and settings.lora is not False else torch.float32


@contextmanager
def _load_errors(name: str) -> Iterator[None]:
    """Turns whatever the libraries raise for a broken folder into an `InputError` that names the model."""
    try:
        yield
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            raise InputError(
                f"model.name = {name!r} cannot be used: its architecture has its own attention code, which Podium "
                f"cannot replace; {ADVICE}"
            ) from None
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(
            f'model.name = {name!r} cannot be loaded: {reason}. Give "embedded", "smollm2-135m", a folder with '
            "safetensors weights, or a hub name that this machine can reach"
        ) from None


def twin_of(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the layers over the same tensors: the memo tells deepcopy that the tensors are already copied."""
    memo = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo).eval()


def _refuse_idle_rank(model: PreTrainedModel, rank: int) -> None:
    """Rejects a too high rank before its adapter is allocated, which could exhaust the memory."""
    widest = max((max(layer.weight.shape) for layer in model.modules() if is_plain_linear(layer)), default=rank)
    if rank > widest:
        raise InputError(
            f"model.lora.r = {rank}: the widest layer of this model has {widest} inputs or outputs, so a higher rank "
            f"adds nothing; give {widest} or less, usually 8 to 64"
        )


@contextmanager
def _bitsandbytes_hidden() -> Iterator[None]:
    """PEFT imports bitsandbytes if it is installed, for quantised layers that no policy has: more than a second."""
    if "bitsandbytes" in sys.modules:
        yield
        return
    sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # which is how Python marks what is not there
    try:
        yield
    finally:
        del sys.modules["bitsandbytes"]


def _with_adapter(model: PreTrainedModel, lora: Any, folder: Path | None) -> Any:
    """PEFT's model around this one, with the adapter of the folder or a new one."""
    with _bitsandbytes_hidden():
        from peft import PeftModel

        made = PeftModel.from_pretrained(model, str(folder), is_trainable=True) if folder else _add_adapter(model, lora)
    config = made.peft_config["default"]
    for key, value in vars(config).items():
        if isinstance(value, set):  # a set's order differs between processes, and PEFT saves that order
            setattr(config, key, sorted(value))
    return made


def _add_adapter(model: PreTrainedModel, lora: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    _refuse_idle_rank(model, lora.r)
    config = LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=lora.targets, task_type="CAUSAL_LM")
    head = model.get_output_embeddings()
    try:
        _keep_to_text_model(model, config)
        peft = get_peft_model(model, config)  # type: ignore[arg-type]
    except (ValueError, re.error) as error:
        raise InputError(f"model.lora.targets = {lora.targets!r}: {str(error).splitlines()[0]}") from None
    adapted = {name: module.base_layer for name, module in model.named_modules() if hasattr(module, "lora_A")}
    for name, layer in adapted.items():
        if layer is head or not is_plain_linear(layer):
            kind = "the LM head" if layer is head else f"a {type(layer).__name__}"
            raise InputError(
                f"model.lora.targets = {lora.targets!r}: {name} is {kind}, which cannot have an adapter here; "
                f"{_lora_advice(model)}"
            )
    return peft


def _keep_to_text_model(model: PreTrainedModel, config: Any) -> None:
    """Names each target in full if the model has linear layers outside its text model (image or audio towers).

    No text goes through those, so an adapter there would never train. Other models keep their targets.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    decoder, head = model.get_decoder(), model.get_output_embeddings()
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, (torch.nn.Linear, Conv1D))}
    inside = set(decoder.modules())
    if all(layer in inside or layer is head for layer in linear.values()):
        return
    if str(config.target_modules).lower() == "all-linear":
        chosen = {name for name, layer in linear.items() if layer is not head}
    else:
        chosen = {name for name, _ in model.named_modules() if check_target_module_exists(config, name)}
    kept = {name for name, layer in model.named_modules() if name in chosen and (layer in inside or layer is head)}
    if not kept:
        raise ValueError("no layer of the text model has such a name")
    config.target_modules = kept


def _lora_advice(model: PreTrainedModel) -> str:
    """Recommends the usual LoRA targets if this model has them, else none."""
    layers = model.get_decoder().named_modules()
    bases = {name.rpartition(".")[2]: getattr(layer, "base_layer", layer) for name, layer in layers}
    usual = '["q_proj", "v_proj"]'
    has_usual = all(is_plain_linear(bases.get(name)) for name in ("q_proj", "v_proj"))
    return f"set model.lora.targets = {usual}" if has_usual else "use lora = false"


def _warn_of_shorter_context(config: Any, name: str) -> None:
    context, longest = max_context_tokens(config), getattr(text_config(config), "max_position_embeddings", None) or 0
    if context < longest:
        warnings.warn(
            f"model.name = {name!r}: prompt and answer may have {context} tokens together, not {longest}: in longer "
            "texts its rotary embeddings (longrope) change for every token, including those already sampled",
            stacklevel=2,
        )


def _stop_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    of_model = getattr(model.generation_config, "eos_token_id", None)
    ids = of_model if isinstance(of_model, list) else [of_model]
    return tuple(sorted({int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None}))


def choose_device(name: str) -> torch.device:
    """`model.device` as a torch device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("model.device = 'cuda': this machine has no CUDA device; use 'cpu' or 'auto'")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
