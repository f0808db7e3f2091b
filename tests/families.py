"""Tiny models with random weights of every family that transformers can build as a causal language model.

    python -m tests.families [--lora] [name ...]

Each is loaded as a run loads it, and what Podium's trainer and in-process engine compute is compared with transformers'
plain eager forward pass, on documents beyond every window. The verdict is "right", "refused" (with a sentence), "wrong"
or "crash"; the last two must not be. The whole sweep takes some minutes, so the tests run a part of it.
"""

import asyncio
import copy
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from podium.engine.inprocess import Inprocess
from podium.errors import InputError
from podium.model.forward import batch_of, place, policy_logprobs
from podium.model.load import EMBEDDED, load_policy
from podium.records import Answer, PrefixGroup, Request, Sampling
from podium.runtime.wiring.memory import memory_plan
from podium.settings.tables import Settings

TOLERANCE = 1e-3
LENGTHS = (97, 9, 41, 10)
"""Tokens of the documents: they differ tenfold and fill several tables."""
TINY: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_ffn_dim": 48,
    "max_seq_len": 128,
    "decoder_attention_heads": 4,
    "encoder_layers": 1,
    "encoder_ffn_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_ffn_hidden_size": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "mamba_d_head": 8,
    "mamba_n_heads": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "state_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "block_size": 8,
}
NO_TEXT_MODEL = {
    *("bert", "bert-generation", "big_bird", "bigbird_pegasus", "blt", "camembert", "data2vec-text", "electra"),
    *("emu3", "ernie", "fuyu", "gemma3n", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "git"),
    *("got_ocr2", "megatron-bert", "mllama", "moshi", "musicgen", "musicgen_melody", "phi4_multimodal", "reformer"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "trocr", "whisper", "xlm", "xlnet"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod", "rwkv", "minimax_m3_vl_text", "aria_text", "prophetnet"),
}
"""Encoders, models of other things than text, and what cannot be built small: not in the sweep."""
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
SMALL_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def plain(kind: str, **changes: Any) -> Any:
    """The family's config, small, with a window wherever it has one; `changes` of None leave a key out."""
    default = CONFIG_MAPPING[kind]()
    small = {key: value for key, value in TINY.items() if _has(default, key)}
    given = {key: value for key, value in {**small, **changes}.items() if value is not None}
    return CONFIG_MAPPING[kind](**copy.deepcopy(given))  # some configs change what they are given


def _has(config: Any, key: str) -> bool:
    try:
        return hasattr(config, key)
    except Exception:  # a key that differs from layer to layer
        return True


def wrapped(kind: str, text: str, tower: dict[str, Any] = SMALL_TOWER, **changes: Any) -> Any:
    """A wrapper for pictures and text around a small text model."""
    inner = plain(text, **changes).to_dict()
    return CONFIG_MAPPING[kind](text_config=inner, vision_config={"image_size": 16, "patch_size": 8, **tower})


SPECIAL: dict[str, Callable[[], Any]] = {
    "falcon": partial(plain, "falcon", head_dim=None),
    "falcon_h1": partial(plain, "falcon_h1", mamba_d_ssm=64, mamba_expand=2),
    "gpt_neo": partial(plain, "gpt_neo", attention_types=[[["global", "local"], 1]], window_size=8),
    "gemma3": partial(wrapped, "gemma3", "gemma3_text", **TYPES),
    "gemma3n_text": partial(plain, "gemma3n_text", **TYPES, num_kv_shared_layers=0),
    "gemma4_text": partial(plain, "gemma4_text", **TYPES, global_head_dim=16, num_kv_shared_layers=0),
    "gemma4": partial(wrapped, "gemma4", "gemma4_text", **TYPES, global_head_dim=16, num_kv_shared_layers=0),
    "llama4": partial(wrapped, "llama4", "llama4_text", intermediate_size_mlp=48),
    "lfm2": partial(plain, "lfm2", layer_types=["conv", "full_attention"]),
    "lfm2_moe": partial(plain, "lfm2_moe", layer_types=["conv", "full_attention"], num_dense_layers=1),
    "mamba2": partial(plain, "mamba2", num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    "dots1": partial(plain, "dots1", n_shared_experts=1),
    "qwen2 with a window": partial(plain, "qwen2", use_sliding_window=True, max_window_layers=1),
    "qwen2_moe": partial(plain, "qwen2_moe", sliding_window=None),
    "qwen2_moe with a window": partial(plain, "qwen2_moe", use_sliding_window=True, max_window_layers=2),
    "phimoe": partial(plain, "phimoe", sliding_window=None, head_dim=None),
    "phimoe with a window": partial(plain, "phimoe", head_dim=None),
    "phi3": partial(plain, "phi3", head_dim=None, sliding_window=None),
    "phi3 with a window": partial(plain, "phi3", head_dim=None),
    "phi3 with longrope": partial(
        plain,
        "phi3",
        head_dim=None,
        sliding_window=None,
        rope_parameters=LONGROPE,
        original_max_position_embeddings=32,
    ),
    "phimoe with longrope": partial(
        plain,
        "phimoe",
        head_dim=None,
        sliding_window=None,
        rope_parameters={**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.3},
    ),
    "llama with longrope": partial(plain, "llama", rope_parameters=LONGROPE),
    "mistral": partial(plain, "mistral", sliding_window=None),
    "mistral with a window": partial(plain, "mistral"),
}
MLA = {"num_key_value_heads": 4, "head_dim": None}
SPECIAL |= {
    "deepseek_v2": partial(plain, "deepseek_v2", **MLA),
    "deepseek_v3": partial(plain, "deepseek_v3", **MLA),
    "deepseek_v32": partial(plain, "deepseek_v32", **MLA, index_head_dim=8, index_n_heads=2, index_topk=8),
    "glm4_moe_lite": partial(plain, "glm4_moe_lite", **MLA),
    "glm_moe_dsa": partial(plain, "glm_moe_dsa", **MLA, index_head_dim=8, index_n_heads=2, index_topk=8),
    "longcat_flash": partial(plain, "longcat_flash", **MLA),
    "minicpm3": partial(plain, "minicpm3", **MLA),
    "youtu": partial(plain, "youtu", **MLA),
    "axk1": partial(plain, "axk1", **MLA),
    "axk2": partial(plain, "axk2", **MLA),
    "codegen": partial(plain, "codegen", rotary_dim=4),
    "gptj": partial(plain, "gptj", rotary_dim=4),
    "granite": partial(plain, "granite", logits_scaling=4.0, residual_multiplier=0.5, embedding_multiplier=2.0),
    "granitemoe": partial(plain, "granitemoe", logits_scaling=4.0),
}
for rope in ("dynamic", "yarn", "linear"):
    SPECIAL[f"llama with {rope} rope"] = partial(
        plain,
        "llama",
        rope_parameters={
            "rope_type": rope,
            "factor": 2.0,
            "rope_theta": 1e4,
            **({"original_max_position_embeddings": 64} if rope == "yarn" else {}),
        },
    )
SPECIAL["llama with llama3 rope"] = partial(
    plain,
    "llama",
    rope_parameters={
        "rope_type": "llama3",
        "factor": 8.0,
        "rope_theta": 1e4,
        "original_max_position_embeddings": 32,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
)
NAMES = [*SPECIAL, *(kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in {*SPECIAL, *NO_TEXT_MODEL})]


def config_of(name: str) -> Any:
    return SPECIAL[name]() if name in SPECIAL else plain(name)


def saved(name: str, folder: Path) -> Path:
    """A model folder; its weights are large enough that a wrong mask or scale shows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(name), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / file, folder)
    return folder


def verdict(name: str, folder: Path, *, lora: Any = False, dtype: str = "float32") -> tuple[str, str]:
    """(right, refused, wrong, crash or unbuilt; the sentence or the gaps)."""
    try:
        saved(name, folder / "model")
    except Exception as error:
        return "unbuilt", f"{type(error).__name__}: {error}"
    settings = Settings.from_dict(tables_of(folder, lora, dtype))
    try:
        trainer, engine = gaps(settings, folder / "model")
    except InputError as error:
        return "refused", str(error)
    except Exception as error:
        return "crash", "".join(traceback.format_exception(error)[-3:])
    return ("right" if max(trainer, engine) <= TOLERANCE else "wrong"), f"trainer {trainer:.2g}, engine {engine:.2g}"


def tables_of(folder: Path, lora: Any, dtype: str) -> dict[str, Any]:
    """Settings of a run with the model in `folder`."""
    model = {"name": str(folder / "model"), "device": "cpu", "dtype": dtype}
    return {
        "run": {"folder": str(folder / "run"), "steps": 1, "prompts_per_step": 2, "rollouts_per_prompt": 2},
        "model": {**model, "lora": {} if lora is True else lora},
        "data": [{"name": "arithmetic", "max_rows": 1000}],
        "reward": [{"name": "arithmetic"}],
        "rollout": {"max_new_tokens": 4},
    }


def gaps(settings: Settings, folder: Path) -> tuple[float, float]:
    """Largest difference of the trainer's and of the engine's logprobs from transformers' own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="model.name = .* change for every token")
        policy = load_policy(settings.model, seed=0)
    memory_plan(settings, policy, longest_prompt=8)
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    context = policy.max_context_tokens
    documents = [[3 + (7 * i * i + 5 * i + n) % 90 for i in range(min(n, context))] for n in LENGTHS]
    expected = [value for ids in documents for value in own_logprobs(own, ids)]
    of_trainer = 0.0
    for _ in range(2):
        policy.model.train()
        placed = place(batch_of(*documents), policy.device)
        made = policy_logprobs(policy.model, placed)[0]
        made.sum().backward()
        policy.model.eval()
        found = made.detach()[placed.row.loss_places].tolist()
        of_trainer = max(of_trainer, _largest(found, expected))
    engine = Inprocess(policy)
    sampling = Sampling(max_new_tokens=min(40, context // 2))
    requests = [
        Request(tuple(documents[0][:length]), sampling, seed, PrefixGroup(str(length), 2))
        for k, length in enumerate((3, min(40, context // 2)))
        for seed in (k, k + 7)
    ]
    of_engine = 0.0
    for request, answer in zip(requests, asyncio.run(_answers(engine, requests)), strict=True):
        whole = own_logprobs(own, [*request.token_ids, *answer.token_ids])
        of_engine = max(of_engine, _largest(answer.logprobs, whole[len(request.token_ids) - 1 :]))
    return of_trainer, of_engine


async def _answers(engine: Inprocess, requests: list[Request]) -> list[Answer]:
    return list(await asyncio.gather(*map(engine.generate, requests)))


def _largest(some: Any, others: Any) -> float:
    gaps = [abs(a - b) for a, b in zip(some, others, strict=True)]
    return max(gaps) if all(gap == gap for gap in gaps) else float("inf")


@torch.no_grad()
def own_logprobs(model: Any, ids: list[int]) -> list[float]:
    every = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().log_softmax(-1)
    return [float(every[t - 1, ids[t]]) for t in range(1, len(ids))]


def main(arguments: list[str]) -> None:
    warnings.simplefilter("ignore")
    lora = "--lora" in arguments
    names = [name for name in arguments if not name.startswith("--")] or NAMES
    counted: Counter[str] = Counter()
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            found, detail = verdict(name, Path(folder), lora=lora)
        counted[found] += 1
        print(f"{found:8} {name}: {detail if found == 'crash' else detail.splitlines()[0]}", flush=True)
    print(dict(counted))


if __name__ == "__main__":
    main(sys.argv[1:])
