# Two commands:
#   make up     start a cluster that answers on http://127.0.0.1:8000
#   make test   check everything: lint, types, import rules, fast tests, real processes
#
# Both make .venv first (1.2 GB on disk, 2.3 GB with what `make test` needs) and need python3 >= 3.11 with venv, make and, for the fast
# kernels, g++.
#
#   make up PORT=8001 PREFILL=2 DECODE=2 MODEL=path-or-id TRANSPORT=tcp ARGS="more flags of baton up"
#   make up TORCH_INDEX=<index of torch's CPU wheels>      on plain PyPI torch is a CUDA build of several GB
#   make up PYTHON=/usr/bin/python3.12

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help up test test-all lint format bench bench-peers chaos simulate-faults clean

VENV := .venv
BIN := $(VENV)/bin
export TORCH_INDEX PYTHON

UP_FLAGS = $(if $(PORT),--port '$(PORT)') $(if $(PREFILL),--prefill '$(PREFILL)') $(if $(DECODE),--decode '$(DECODE)') \
	$(if $(MODEL),--model '$(MODEL)') $(if $(TRANSPORT),--transport '$(TRANSPORT)') $(ARGS)

help:
	@sed -n '/^$$/q;s/^# \{0,1\}//p' Makefile

# `exec`: signals that make passes on reach baton itself. It ends with 0 when it was asked to stop, so that
# Ctrl-C leaves no "Error" line behind.
up: $(VENV)/.runtime
	@exec $(BIN)/baton up $(UP_FLAGS)

test: lint
	$(BIN)/python -m pytest -n 2 -m "not slow"
	$(BIN)/python -m pytest tests/process -m "process and not slow"

test-all: lint
	$(BIN)/python -m pytest -n 2
	$(BIN)/python -m pytest tests/process

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# A real cluster, hurt at random for three minutes; ARGS="--seconds 3600 --seed 7" for another.
chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos $(ARGS)

# 10,000 histories of a simulated cluster; ARGS="--count 500 --first-seed 20000", ARGS="--replay SEED" for one again.
simulate-faults: $(VENV)/.dev
	$(BIN)/python -m tests.simulation $(ARGS)

bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks $(ARGS)

# Beside llama.cpp and OpenVINO, which are installed into ~/.cache/baton/peers; ARGS="--quick --only W1,W2 --json FILE".
bench-peers: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks.peers $(ARGS)

# Everything that was made in this folder. The converted demo model and the compiled kernels stay in ~/.cache/baton.
clean:
	rm -rf $(VENV) .baton build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp is as new as the last install that pyproject.toml asked for; the developers' set includes the users'.
$(VENV)/.runtime: pyproject.toml deploy/venv.sh
	@sh deploy/venv.sh runtime

$(VENV)/.dev: pyproject.toml deploy/venv.sh
	@sh deploy/venv.sh dev
