# subbayes: `make` lists the targets. `make demo` and `make test` need only Python 3.11 and make.
#
# Settings, each overridable on the command line:
#   PYTHON=python3.12        the interpreter that makes .venv (default: the first of 3.11 or newer)
#   TORCH=2.8.0              the version of torch (default: the one the project is tested with)
#   CONSTRAINTS=/dev/null    other versions of everything else (default: constraints.txt)
#   ARGS="-k posterior -x"   more arguments for pytest, or for the demo

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

TORCH ?= 2.13.0
TORCH_OLDEST ?= 2.7.0
CONSTRAINTS ?= constraints.txt
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
CORE := $(VENV)/.installed-torch-$(TORCH)
DEV := $(CORE)-dev
DOCS := $(CORE)-docs
ALL := $(CORE)-all
RECIPE := pyproject.toml $(filter-out /dev/null,$(CONSTRAINTS))

# The documentation theme announces its successor at every build.
export NO_MKDOCS_2_WARNING := 1

# Tests run on several processes: one thread in each, so that they do not fight for cores.
# Compiled files are kept even where the user's settings say otherwise: the tests start processes.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# Each process runs neighbouring tests, which share models, until the others' have run out.
WORKERS_STEAL := -n $(WORKERS) --dist worksteal

# Shapes and types of annotations are checked at run time, which adds a third to the time of the
# tests.
SHAPES := --jaxtyping-packages=subbayes,annotations.checked

ifndef SUBBAYES_DATA
ifneq ($(wildcard ../shared/data/.),)
export SUBBAYES_DATA := $(abspath ../shared/data)
endif
endif

# The first interpreter that works and is new enough, or the one asked for.
define find_python
	for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3.14 python3 python); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	  then python="$$candidate"; break; fi; \
	done; \
	if [ -z "$${python:-}" ]; then \
	  echo "subbayes needs Python 3.11 or newer, found none as: $(or $(PYTHON),python3.11 … python3)." \
	    "Install it, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; fi
endef

.PHONY: help venv install demo test test-all test-oldest test-gpu fuzz lint types check docs docs-serve build constraints clean

help: ## list the targets
	@echo "subbayes: Bayesian inference over the part of a neural network that matters"
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

venv: $(CORE) ## make .venv with the library in it
install: $(DEV) ## make .venv with the library, its extras and the developers' tools

$(CORE): $(RECIPE)
	@$(find_python); \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  echo "[1/3] making $(VENV) with $$("$$python" --version)"; \
	  "$$python" -m venv $(VENV) || { echo "Could not make $(VENV): on Debian and Ubuntu," \
	    "install the package python3-venv first." >&2; exit 1; }; \
	else echo "[1/3] using $(VENV) with $$($(BIN)/python --version)"; fi
	@echo "[2/3] installing torch $(TORCH) (the largest download, a minute or more)"
	@$(PIP) install "torch==$(TORCH)" -c $(CONSTRAINTS)
	@echo "[3/3] installing subbayes and what it needs"
	@$(PIP) install -e . "torch==$(TORCH)" -c $(CONSTRAINTS)
	@rm -f $(VENV)/.installed-* && touch $@

$(DEV): $(CORE)
	@echo "[dev] installing the extras and the developers' tools"
	@$(PIP) install -e ".[dev,experiments,adapters,arviz,parquet,lightning,flows,onnx,botorch]" "torch==$(TORCH)" -c $(CONSTRAINTS)
	@touch $@
	@echo "[dev] done: $(BIN)/subbayes --help"

$(ALL): $(DEV)
	@echo "[all] installing the samplers of other libraries"
	@$(PIP) install -e ".[samplers]" "torch==$(TORCH)" -c $(CONSTRAINTS)
	@touch $@

$(DOCS): $(CORE)
	@echo "[docs] installing the documentation tools"
	@$(PIP) install -e ".[docs]" "torch==$(TORCH)" -c $(CONSTRAINTS)
	@touch $@

demo: $(CORE) ## show in five short studies where a posterior pays: report in runs/demo/
	@$(BIN)/python -m examples.demo $(ARGS)

test: $(DEV) ## run the tests (but the slow ones)
	@$(ONE_THREAD) $(BIN)/python -m pytest $(WORKERS_STEAL) $(ARGS)

test-all: $(ALL) ## run all tests, the slow ones too, and check the shapes of all calls
	@$(ONE_THREAD) $(BIN)/python -m pytest $(WORKERS_STEAL) -m "slow or not slow" $(SHAPES) $(ARGS)

test-oldest: constraints-oldest.txt ## run the tests with the oldest supported versions, in .venv-oldest
	@$(find_python); "$$python" -m venv .venv-oldest
	@echo "[oldest] installing torch $(TORCH_OLDEST) and the versions of constraints-oldest.txt"
	@.venv-oldest/bin/python -m pip --disable-pip-version-check -qq install \
	  -e ".[dev,experiments,arviz,parquet]" "torch==$(TORCH_OLDEST)" -c constraints-oldest.txt
	@$(ONE_THREAD) .venv-oldest/bin/python -m pytest $(WORKERS_STEAL) $(ARGS)

test-gpu: $(DEV) ## run the tests of devices on CUDA; without it on a pretended device
	@$(ONE_THREAD) $(BIN)/python -m pytest -m "slow or not slow" tests/devices tests/benchmarks/test_benchmark_gpu.py $(ARGS)

fuzz: $(DEV) ## load damaged and forged artifacts of every kind in a limited process (ARGS="--cases 20000")
	@$(ONE_THREAD) PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

lint: $(DEV) ## ruff: formatting, and rules for code and docstrings
	@$(BIN)/ruff format --check --quiet . || { echo "Run: .venv/bin/ruff format ." >&2; exit 1; }
	@$(BIN)/ruff check .

types: $(DEV) ## mypy on the package, and shapes of annotations in a run of each engine
	@$(BIN)/mypy
	@$(ONE_THREAD) $(BIN)/python -m pytest -q --disable-warnings $(SHAPES) tests/test_annotations.py

check: lint types test ## what continuous integration runs

docs: $(DOCS) ## build the documentation into site/, warnings are errors
	@$(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

docs-serve: $(DOCS) ## show the documentation at a local address while writing it
	@$(BIN)/mkdocs serve

build: $(CORE) ## build the wheel into dist/
	@$(PIP) wheel --no-deps --wheel-dir dist .
	@ls dist/*.whl

constraints: $(DEV) $(DOCS) ## write the versions of .venv to constraints.txt
	@{ sed '/^[^#]/,$$d' constraints.txt; \
	  $(BIN)/python -m pip --disable-pip-version-check freeze --exclude-editable \
	  | grep -v -i -E '^(torch|torchvision|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+|pip|setuptools|wheel)( ?@|==)' \
	  | grep -v ' @ '; } > $(VENV)/constraints.txt
	@mv $(VENV)/constraints.txt constraints.txt

clean: ## remove what make made (but not runs/)
	@rm -rf $(VENV) .venv-oldest build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
