"""vLLM in this process: it loads the base model once, and new weights reach it in memory.

In: single requests, any number at the same time; they share vLLM's steps. Out: one answer per request. Under LoRA a
request keeps the adapter of the policy version that it began with (id = version + 1; the base does not change). Full
weights go through vLLM's own reload, from the trainer's tensors. Logprobs are of the distribution really sampled from.
"""

import asyncio
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field
from torch.distributed.tensor import DTensor

from podium.engine.decoding.queue import check_room
from podium.engine.decoding.trial import check_application
from podium.engine.vllm.evidence import held_adapter, held_full
from podium.engine.vllm.steps import Served, SharedSteps
from podium.errors import EngineError, InputError
from podium.model.device_thread import on_device_thread
from podium.model.evidence import Held, named_trained
from podium.model.handoff import in_saved_format, publish, read_published, remove_published, write_adapter
from podium.model.load import Policy
from podium.records import Answer, EngineTraits, Request, Sampling
from podium.stages import OnTokens

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
"""vLLM takes a draw back when it cuts a prompt in parts, which torch's CPU generators cannot do."""
ADAPTERS_IN_A_STEP, ADAPTERS_IN_MEMORY = 2, 8
"""The second is of the host's memory: a rollout that outlives its adapter's folder still has its adapter."""
SLEEP_LEVEL = 1
"""Weights wait in the host's memory. Level 2 drops them, with buffers that no push contains."""


class VllmLocal:
    """`snapshot` is only checked against `sleep`: vLLM always has weights of its own."""

    traits = EngineTraits(
        channels=("shared", "adapter", "disk"),
        packages=("vllm",),
        runs_in_worker=True,
        plans_threads=True,
        shows_weights=True,
    )

    def __init__(
        self,
        policy: Policy,
        snapshot: bool = False,
        *,
        memory_share: Annotated[
            float | None, Field(gt=0, lt=1, description="of the GPU's memory, for weights and cache; by default 0.4")
        ] = None,
        max_context_tokens: Annotated[
            int | None, Field(ge=2, description="by default the longest prompt and answer of the run")
        ] = None,
        concurrency: Annotated[int, Field(ge=1, description="rollouts written at the same time")] = 256,
        dtype: Annotated[
            Literal["float32", "bfloat16"] | None, Field(description="by default float32 on a CPU, bfloat16 on a GPU")
        ] = None,
        eager: Annotated[bool, Field(description="no compilation and no CUDA graphs: slower, starts at once")] = False,
        tensor_parallel: Annotated[int, Field(ge=1, description="GPUs that share one copy of the model")] = 1,
        sleep: Annotated[bool, Field(description="give the GPU's memory to the trainer while it steps")] = False,
    ) -> None:
        self.policy_version: int | None = None
        _check_device(policy, snapshot, memory_share, tensor_parallel, sleep)
        precision = dtype or ("bfloat16" if policy.device.type == "cuda" else "float32")
        can_receive = policy.peft is None and policy.device.type == "cuda"
        self.max_context_tokens = min(max_context_tokens or policy.max_context_tokens, policy.max_context_tokens)
        self.traits = replace(
            type(self).traits,
            dtype=precision,
            keeps_weights=policy.peft is not None,
            max_context_tokens=self.max_context_tokens,
            transfer_ranks=tensor_parallel if can_receive else 0,
        )
        self.tensor_parallel = tensor_parallel
        self._policy, self._loads, self._asleep, self._is_tried = policy, 0, False, False
        self._folder = Path(tempfile.mkdtemp(prefix="podium-vllm-"))
        options = {
            "dtype": precision,
            "max_model_len": self.max_context_tokens,
            "max_num_seqs": concurrency,
            "enforce_eager": eager,
            "tensor_parallel_size": tensor_parallel,
            "enable_sleep_mode": sleep,
        }
        if policy.device.type == "cpu":
            options |= ON_CPU
        else:
            options |= {"gpu_memory_utilization": memory_share or MEMORY_SHARE}
            options |= {"weight_transfer_config": {"backend": "nccl"}} if policy.peft is None else {}
        self._engine = _start(policy, options)
        self._steps = SharedSteps(self._engine)
        known = self._engine.model_config.get_vocab_size()
        if known != policy.vocabulary:
            raise InputError(
                f"engine.name = 'vllm_local': vLLM's model has {known} ids, the policy {policy.vocabulary}"
            )

    async def generate(self, request: Request, on_tokens: OnTokens | None = None) -> Answer:
        check_room(request, self.max_context_tokens)
        await self.wake()
        parameters = _parameters(request.sampling, request.seed, on_tokens is not None)
        output, versions = await self._steps.output(request.token_ids, parameters, on_tokens)
        return _answer_of(output.outputs[0], versions)

    def release(self, name: str) -> None:
        """Nothing to free: vLLM's prefix cache makes room by itself."""

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        await self.wake()
        parameters = _vllm_parameters(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        output, _ = await self._steps.output(token_ids, parameters)
        found = output.prompt_logprobs
        if found is None or len(found) != len(token_ids) or found[0] is not None:
            num = None if found is None else len(found)
            raise EngineError(f"vLLM returned {num} logprobs for {len(token_ids)} tokens")
        return [float(each[i].logprob) for i, each in zip(token_ids[1:], found[1:], strict=True)]

    async def held(self) -> Held | None:
        """What its workers sample with; None for full weights that are split among GPUs."""
        await self.wake()
        return await on_device_thread(self._held)

    def _held(self) -> Held | None:
        # The parameters themselves: a detached one has lost the shape that ZeRO-3 gives it.
        trained = named_trained(self._policy.model)
        shapes = {name: tuple(getattr(each, "ds_shape", each.shape)) for name, each in trained}
        if self._policy.peft is not None:
            layers = [name.removesuffix(".lora_A") for name in shapes if name.endswith(".lora_A")]
            rank = self._policy.peft.peft_config["default"].r
            return held_adapter(self._engine, self._steps.served.adapter, layers, rank)
        return None if self.tensor_parallel > 1 else held_full(self._engine, shapes, self.policy_version or 0)

    async def _try_adapters(self) -> None:
        """Checks once, before the first adapter, that vLLM applies adapters on every layer."""
        if self._policy.peft is None or self._is_tried:
            return
        self._is_tried = True
        if any(isinstance(each, DTensor) or hasattr(each, "ds_shape") for each in self._policy.model.parameters()):
            warnings.warn(
                "vLLM is not tested with trial adapters, because the trainer's ranks share the base model; each push "
                "is still compared with what vLLM's workers hold",
                stacklevel=2,
            )
            return

        async def load(adapter: dict[str, torch.Tensor]) -> None:
            await on_device_thread(self._write_and_attach, adapter.items(), 0)

        await check_application(self._policy, self.traits.dtype, load, self.score, type(self).__name__)

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        await self._load(self._reload if self._policy.peft is None else self._write_and_attach, weights, version)

    async def load_folder(self, folder: Path, version: int) -> None:
        """An adapter's folder goes to vLLM as it is."""
        expected = dict(self._policy.named_weights())
        weights = await asyncio.to_thread(read_published, folder, expected, version)
        if self._policy.peft is None:
            await self.load_weights(weights.items(), version)
        else:
            await self._load(self._attach, folder, version)

    async def _load(self, load: Callable[[Any, int], None], source: Any, version: int) -> None:
        await self.wake()
        await self._try_adapters()
        await on_device_thread(load, source, version)
        self.policy_version = version

    async def sleep(self) -> None:
        """Frees the GPU's memory, unless rollouts are under way."""
        await on_device_thread(self._sleep)

    async def wake(self) -> None:
        """Takes the memory back. Every method that needs the memory calls this first."""
        if self._asleep:
            await on_device_thread(self._wake)

    async def join_transfer(self, init_info: dict[str, Any]) -> None:
        """Meets a trainer in another process, for weights that travel from GPU to GPU (sync/nccl.py)."""
        await on_device_thread(
            self._engine.collective_rpc, "init_weight_transfer_engine", kwargs={"init_info": init_info}
        )

    async def receive_weights(self, update_info: dict[str, Any], version: int) -> None:
        """Takes the weights that the trainer sends at the same time, between two steps."""
        await self._load(self._receive, update_info, version)

    def close(self) -> None:
        """Gives the memory back."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._engine.engine_core.shutdown()

    def _sleep(self) -> None:
        if not self._steps.is_busy and not self._asleep:
            self._engine.sleep(level=SLEEP_LEVEL)
            self._asleep = True

    def _wake(self) -> None:
        if self._asleep:
            torch.cuda.empty_cache()  # what the trainer has freed stays reserved for it otherwise
            self._engine.wake_up()
            self._asleep = False

    def _reload(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        detached = ((name, tensor.detach()) for name, tensor in weights)
        weights = in_saved_format(self._policy.model, detached)
        if self.tensor_parallel > 1:  # its workers are processes of their own and read a folder
            folder = publish(self._folder, self._policy, weights, version)
            self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            remove_published(folder)
        else:
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if self._policy.device.type == "cpu":
            self._engine.apply_model(_pack_again)
        self._serve_full(version)

    def _receive(self, update_info: dict[str, Any], version: int) -> None:
        self._engine.collective_rpc("start_weight_update")
        self._engine.collective_rpc("update_weights", kwargs={"update_info": update_info})
        self._engine.collective_rpc("finish_weight_update")
        self._serve_full(version)

    def _serve_full(self, version: int) -> None:
        self._loads += 1
        self._steps.serve(Served(version, f"{version}/{self._loads}"))
        if not self._steps.is_busy:
            self._engine.reset_prefix_cache()  # only to make room: the salt keeps versions apart

    def _write_and_attach(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        assert self._policy.peft is not None
        folder = self._folder / f"version-{version}-{self._loads}"
        write_adapter(folder, self._policy.peft.peft_config["default"], weights)
        try:
            self._attach(folder, version, True)
        except EngineError:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _attach(self, folder: Path, version: int, own_folder: bool = False) -> None:
        """New requests use this adapter; after an error they go on with the one before."""
        from vllm.lora.request import LoRARequest

        self._loads += 1
        # In place: a version that is pushed a second time has other weights.
        adapter = LoRARequest(folder.name, version + 1, str(folder), load_inplace=True)
        problem = f"vLLM did not take the adapter of policy version {version}"
        try:
            is_taken = self._engine.add_lora(adapter)
        except Exception as error:
            raise EngineError(f"{problem}: {error}") from error
        if not is_taken:
            raise EngineError(problem)
        served = LoRARequest(folder.name, version + 1, str(folder))
        self._steps.serve(Served(version, f"{version}/{self._loads}", served, own_folder))


def _answer_of(output: Any, versions: tuple[int, int]) -> Answer:
    ids = tuple(output.token_ids)
    if output.logprobs is None or len(output.logprobs) != len(ids):
        raise EngineError(f"vLLM returned {len(ids)} ids and {len(output.logprobs or ())} logprobs for a rollout")
    if output.finish_reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended a rollout with {output.finish_reason!r}")
    logprobs = tuple(float(each[i].logprob) for i, each in zip(ids, output.logprobs, strict=True))
    return Answer(ids, logprobs, output.finish_reason, versions)


def _check_device(
    policy: Policy, snapshot: bool, memory_share: float | None, tensor_parallel: int, sleep: bool
) -> None:
    """Refuses options that this machine or this schedule does not allow."""
    on_cpu = policy.device.type == "cpu"
    if memory_share is not None and on_cpu:
        raise InputError("engine.memory_share has no effect on a CPU; set VLLM_CPU_KVCACHE_SPACE (in GiB) instead")
    there = 1 if on_cpu else torch.cuda.device_count()
    if tensor_parallel > there:
        kind = "a CPU is one device" if on_cpu else f"{there} GPUs are here"
        raise InputError(f"engine.tensor_parallel = {tensor_parallel}, but {kind}; give at most {there}")
    if sleep and on_cpu:
        raise InputError("engine.sleep has no effect on a CPU: vLLM frees only a GPU's memory; remove it")
    if sleep and snapshot:
        raise InputError(
            "engine.sleep needs run.sync_every = 1: in other schedules rollouts are written while the trainer steps"
        )


def _pack_again(model: Any) -> None:
    """On a CPU vLLM multiplies by packed weights, and its reload does not pack two kinds: a tied head and experts."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(module)
    head = getattr(model, "lm_head", None)
    if head is not None and hasattr(head, "quant_method"):
        head.quant_method.process_weights_after_loading(head)


def _parameters(sampling: Sampling, seed: int, has_listener: bool) -> Any:
    return _vllm_parameters(
        has_listener,
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k or 0,
        top_p=sampling.top_p or 1.0,
        seed=seed,
        stop_token_ids=list(sampling.stop_ids),
        ignore_eos=True,  # `stop_ids` alone end an answer
        logprobs=0,
    )


def _vllm_parameters(has_listener: bool = False, **options: Any) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.CUMULATIVE if has_listener else RequestOutputKind.FINAL_ONLY
    return SamplingParams(detokenize=False, output_kind=kind, **options)


def listed_rank(rank: int) -> int:
    """The smallest sufficient rank, from 8 on, for which vLLM has kernels."""
    from vllm.config.lora import MaxLoRARanks

    listed = sorted(each for each in get_args(MaxLoRARanks) if each >= 8)
    if rank > listed[-1]:
        raise InputError(f"model.lora.r = {rank}: vLLM takes adapters up to rank {listed[-1]}; give a smaller one")
    return next(each for each in listed if each >= rank)


def _start(policy: Policy, options: dict[str, Any]) -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise InputError(f"engine.name = 'vllm_local': vLLM cannot be imported ({error}); pip install vllm") from None
    lora: dict[str, Any] = {}
    if policy.peft is not None:
        # With LoRA vLLM uses its Triton kernel for experts, on a CPU too, where there is no Triton.
        if policy.device.type == "cpu" and any(".experts." in name for name, _ in policy.model.named_parameters()):
            raise InputError(
                "engine.name = 'vllm_local' on a CPU cannot compute a mixture of experts with LoRA: vLLM's kernel for "
                "it needs a GPU; use engine.name = 'inprocess', or model.lora = false"
            )
        rank = listed_rank(policy.peft.peft_config["default"].r)
        adapted = sorted({name.split(".")[-2] for name, _ in policy.named_weights()})
        if "lm_head" in adapted:
            raise InputError(
                "model.lora.targets names lm_head: vLLM cannot score and sample in one step through an adapted head; "
                "remove it, or use another engine"
            )
        slots = {"max_loras": ADAPTERS_IN_A_STEP, "max_cpu_loras": ADAPTERS_IN_MEMORY}
        lora = {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": adapted, **slots}
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
