# Every target sets itself up in .venv, on a machine with Python >= 3.10 and nothing else.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
WORKERS ?= 2
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

ifdef SYSTEM
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
# The name carries TORCH and PYTHON, so that another choice is installed and the same one is not.
READY := $(VENV)/.ready-$(shell echo '$(TORCH) $(PYTHON)' | cksum | cut -d' ' -f1)
endif

PIP := $(PY) -m pip install -qq --disable-pip-version-check
# One thread a process: the test workers and the interpreter's tasks share the cores already.
RUN := env PYTHONPATH=src OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 $(PY)
PYTEST := $(RUN) -m pytest -q --durations=10
PARALLEL := -n $(WORKERS) --dist worksteal -m "not gpu"
MODEL := examples/tiny-moe
INPUTS := $(MODEL)/layer_inputs.safetensors

.PHONY: help
help:
	@echo "make run             what this machine can run, then the kernel on a small trained model"
	@echo "make test            lint and all tests that need no GPU"
	@echo "make test-no-triton  the same tests with Triton hidden"
	@echo "make test-oldest-triton   the compile tests on Triton 3.6.0"
	@echo "make test-gpu        the tests that need an NVIDIA GPU (capability 9.0)"
	@echo "make clean           remove .venv and caches"
	@echo
	@echo "make PYTHON=python3.12 test       with another Python"
	@echo "make TORCH='torch==2.11.0' test   with another torch (default: $(TORCH))"
	@echo "make SYSTEM=1 test-gpu            with the Python you have, as it is: no .venv, installs nothing"

$(VENV)/.ready-%: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "megamoe needs Python 3.10 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Choose one with: make PYTHON=python3.12"; exit 1; }
	@echo "set-up 1/3: $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment." \
	       "On Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@echo "set-up 2/3: $(TORCH) (the longest step: up to a few minutes)"
	@$(PIP) $(TORCH)
	@echo "set-up 3/3: megamoe and its test tools"
	@$(PIP) --editable '.[dev]'
	@rm -f $(VENV)/.ready-*
	@touch $@

.PHONY: run
run: $(READY)
	@$(RUN) -m megamoe.cli doctor --short
	@echo
	@$(RUN) -m megamoe.cli run --model $(MODEL) --inputs $(INPUTS) --ranks 2 --recipe mxfp4 $(ARGS)
	@echo
	@$(RUN) -m megamoe.cli run --model $(MODEL) --inputs $(INPUTS) --ranks 2 --recipe bf16 $(ARGS)

.PHONY: lint
lint: $(READY)
	@$(RUN) -m ruff check .

.PHONY: test
test: lint
	@SECONDS=0; $(PYTEST) $(PARALLEL) $(ARGS); echo "make test: $$SECONDS seconds"

.PHONY: test-no-triton
test-no-triton: $(READY)
	@SECONDS=0; MEGAMOE_HIDE_TRITON=1 $(PYTEST) $(PARALLEL) $(ARGS); \
	  echo "make test-no-triton: $$SECONDS seconds"

# the kernels of the oldest Triton that works, beside the newest that `make test` compiles
OLDEST := $(VENV)/triton-3.6.0
$(OLDEST): $(READY)
	@$(PIP) --no-deps --target $@ triton==3.6.0

.PHONY: test-oldest-triton
test-oldest-triton: $(OLDEST)
	@SECONDS=0; env PYTHONPATH=$(OLDEST):src OMP_NUM_THREADS=1 $(PY) -m pytest -q --durations=3 \
	  -n $(WORKERS) --dist worksteal tests/test_compile.py $(ARGS); \
	  echo "make test-oldest-triton: $$SECONDS seconds"

.PHONY: test-gpu
test-gpu: $(READY)
	@$(PYTEST) -m gpu $(ARGS)

.PHONY: clean
clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist src/megamoe.egg-info
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
