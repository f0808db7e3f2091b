"""vLLM in this process: the base model is loaded once and stays warm, new weights reach it in memory.

In: requests. Out: answers as they become whole, in any order. Under LoRA every request carries the adapter of the
current policy version (id = version + 1; the base stays untouched, old adapters are dropped); full weights go through
vLLM's own reload, from the trainer's tensors. Logprobs are of the distribution really sampled from. The prefix cache is
salted with the policy version, so that no answer is written from another version's keys.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from podium.engine._draft import Draft
from podium.errors import EngineError, InputError
from podium.model.device_thread import on_device_thread
from podium.model.handoff import read_published, write_adapter
from podium.model.load import Policy
from podium.records import Answer, FinishReason, Request, Sampling

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its scheduler in this process: weights are handed over in memory
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer uses the same cores
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


MEMORY_SHARE = 0.4
ON_CPU = {"enable_chunked_prefill": False}
"""vLLM takes a draw back when a prompt is cut in parts, which torch's CPU generators cannot do."""


class VllmLocal:
    """`snapshot` is of no concern here: vLLM always has weights of its own."""

    channels = ("shared", "adapter", "disk")

    def __init__(
        self,
        policy: Policy,
        snapshot: bool = False,
        *,
        memory_share: Annotated[
            float | None, Field(gt=0, lt=1, description="of the GPU's memory, for weights and cache; by default 0.4")
        ] = None,
        max_context_tokens: Annotated[int | None, Field(ge=2, description="by default the model's")] = None,
        concurrency: Annotated[int, Field(ge=1, description="rollouts written at the same time")] = 256,
        dtype: Annotated[
            Literal["float32", "bfloat16"] | None, Field(description="by default float32 on a CPU, bfloat16 on a GPU")
        ] = None,
        eager: Annotated[bool, Field(description="no compilation and no CUDA graphs: slower, starts at once")] = False,
    ) -> None:
        self.policy_version: int | None = None
        if memory_share is not None and policy.device.type == "cpu":
            raise InputError("engine.memory_share has no effect on a CPU; set VLLM_CPU_KVCACHE_SPACE (in GiB) instead")
        self.dtype = dtype or ("bfloat16" if policy.device.type == "cuda" else "float32")
        self._policy = policy
        self._folder = Path(tempfile.mkdtemp(prefix="podium-vllm-"))
        self._adapter: Any = None
        self._engine = _start(
            policy,
            {
                "dtype": self.dtype,
                "max_model_len": min(max_context_tokens or policy.max_context_tokens, policy.max_context_tokens),
                "max_num_seqs": concurrency,
                "enforce_eager": eager,
                **(ON_CPU if policy.device.type == "cpu" else {"gpu_memory_utilization": memory_share or MEMORY_SHARE}),
            },
        )
        known = self._engine.model_config.get_vocab_size()
        if known != policy.vocabulary:
            raise InputError(
                f"engine.name = 'vllm_local': vLLM's model has {known} ids, the policy {policy.vocabulary}"
            )

    async def generate(self, requests: Sequence[Request], sampling: Sampling) -> AsyncIterator[Answer]:
        version = self.policy_version or 0
        drafts = {request.key: Draft(request, version) for request in requests}
        pending = {f"{request.key}/{k}" for request in requests for k in range(len(request.seeds))}
        try:
            await on_device_thread(self._enqueue, requests, sampling, version)
            while pending:
                for output in await on_device_thread(self._engine.step):
                    if not output.finished or output.request_id not in pending:
                        continue
                    pending.discard(output.request_id)
                    key, sample = map(int, output.request_id.split("/"))
                    drafts[key].add(sample, *rollout_of(output.outputs[0]), version)
                    if drafts[key].is_whole:
                        yield drafts.pop(key).answer()
        finally:
            if pending:
                await on_device_thread(self._engine.abort_request, sorted(pending))

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        return await on_device_thread(self._score, list(token_ids))

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        await on_device_thread(self._load_weights, weights, version)
        self.policy_version = version

    async def load_folder(self, folder: Path, version: int) -> None:
        expected = dict(self._policy.named_weights())
        weights = await asyncio.to_thread(read_published, folder, expected, version)
        await self.load_weights(weights.items(), version)

    def close(self) -> None:
        """Gives the memory back."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._engine.engine_core.shutdown()

    def _enqueue(self, requests: Sequence[Request], sampling: Sampling, version: int) -> None:
        for request in requests:
            for k, seed in enumerate(request.seeds):
                self._add(f"{request.key}/{k}", request.token_ids, _parameters(sampling, seed), version)

    def _add(self, name: str, token_ids: Sequence[int], parameters: Any, version: int) -> None:
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": str(version)}
        self._engine.add_request(name, prompt, parameters, lora_request=self._adapter)

    def _score(self, token_ids: list[int]) -> list[float]:
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self._add("score", token_ids, parameters, -1 if self.policy_version is None else self.policy_version)
        while True:
            for output in self._engine.step():
                if output.request_id == "score" and output.finished:
                    return aligned_logprobs(token_ids, output.prompt_logprobs)

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        if self._policy.peft is None:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": _detached(weights)})
            self._engine.apply_model(_repack_tied_head)
            self._engine.reset_prefix_cache()
            return
        from vllm.lora.request import LoRARequest

        folder = self._folder / f"version-{version}"
        write_adapter(folder, self._policy.peft.peft_config["default"], weights)
        adapter = LoRARequest(f"version-{version}", version + 1, str(folder))
        previous, self._adapter = self._adapter, adapter
        if not self._engine.add_lora(adapter):
            raise EngineError(f"vLLM did not take the adapter of policy version {version}")
        if previous is not None and previous.lora_int_id != adapter.lora_int_id:
            self._engine.remove_lora(previous.lora_int_id)
            shutil.rmtree(previous.lora_path, ignore_errors=True)


def rollout_of(output: Any) -> tuple[list[int], list[float], FinishReason]:
    """Ids, their logprobs and why it ended; anything but one logprob an id and an end of ours is an error."""
    ids = list(output.token_ids)
    if output.logprobs is None or len(output.logprobs) != len(ids):
        raise EngineError(f"vLLM returned {len(ids)} ids and {len(output.logprobs or ())} logprobs for a rollout")
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a rollout with {output.finish_reason!r}")
    return ids, [float(each[i].logprob) for i, each in zip(ids, output.logprobs, strict=True)], output.finish_reason


def aligned_logprobs(token_ids: Sequence[int], found: Any) -> list[float]:
    """vLLM's N logprobs with a leading None to N − 1 of them; any other shape is an error."""
    if found is None or len(found) != len(token_ids) or found[0] is not None:
        raise EngineError(f"vLLM returned {None if found is None else len(found)} logprobs for {len(token_ids)} tokens")
    return [float(each[i].logprob) for i, each in zip(token_ids[1:], found[1:], strict=True)]


def _detached(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor.detach()) for name, tensor in weights)


def _repack_tied_head(model: Any) -> None:
    """On a CPU vLLM multiplies by a packed copy of the head, which its reload forgets where the head is tied."""
    head = getattr(model, "lm_head", None)
    if head is not None and head.weight.device.type == "cpu" and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


def _parameters(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p or 1.0,
        seed=seed,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # the run says which ids end an answer
        logprobs=0,
        detokenize=False,
    )


def _start(policy: Policy, options: dict[str, Any]) -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise InputError(f"engine.name = 'vllm_local': vLLM cannot be imported ({error}); pip install vllm") from None
    lora: dict[str, Any] = {}
    if policy.peft is not None:
        rank = policy.peft.peft_config["default"].r
        lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": max(8, rank)}
    arguments = EngineArgs(
        model=policy.source,
        tokenizer=policy.source,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        enable_prefix_caching=True,
        disable_log_stats=True,
        **lora,
        **options,
    )
    return LLMEngine.from_engine_args(arguments)
