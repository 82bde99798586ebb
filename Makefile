# Two commands are enough: `make run` and `make test`. Both do all their own set-up in .venv.
#
#   make run MODEL=qwen3-4b ARGS='--port 9000'    serve a model (none named: the starter)
#   make test ARGS='-x tests/test_guards.py'      the test suite, or a part of it
#
# Variables: PYTHON (which interpreter makes .venv), MLX (cpu, cuda or metal; found out by itself).

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml .ci/setup.sh

.PHONY: help setup run test lint wheel clean

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

setup: $(VENV)/.ready

$(VENV)/.ready: $(INPUTS)
	@bash .ci/setup.sh runtime

$(VENV)/.ready-test: $(VENV)/.ready
	@bash .ci/setup.sh test

run: setup
	@exec $(BIN)/mlx-troupe serve $(if $(MODEL),"$(MODEL)") $(ARGS)

# The whole suite on up to four processes, a file's tests in one of them; a part of it in one.
test: $(VENV)/.ready-test
	@$(BIN)/pytest $(or $(ARGS),-n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder)

lint: $(VENV)/.ready-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@bash .ci/mypy.sh $(BIN)/mypy

wheel: $(VENV)/.ready
	@rm -rf dist build
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@rm -rf build
	@ls dist/*.whl

clean:
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
