"""Imports what a run with vLLM on a CPU needs, for a fork server whose commands sample with it."""

import os

from podium.engine.vllm_local import ENVIRONMENT

os.environ |= ENVIRONMENT  # vLLM reads them when it is imported

import vllm.lora.worker_manager
import vllm.model_executor.models.llama
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker  # noqa: F401
