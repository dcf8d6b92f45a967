# Everything starts here: `make demo` sets up and runs the main job, `make test` sets up and passes the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup demo test prove lint types bench pretrain clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Transect needs Python 3.11 or newer: set PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) (once; a few minutes)"
	@$(PIP) torch numpy
	@$(PIP) -e '.[test,lint]'
	@$(BIN)/python -m transect.ops.cpu.build
	@touch $@

demo: setup
	@$(BIN)/transect demo

# Two processes share the tests; `make test WORKERS=0` runs all in one.
WORKERS ?= 2
test: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Everything: also the cross products, long searches and slow machinery that `make test` leaves out.
prove: setup
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --prove

lint: setup
	@$(BIN)/ruff check src tests benchmarks examples
	@$(BIN)/ruff format --check src tests benchmarks examples
	@$(BIN)/lint-imports

types: setup
	@$(BIN)/mypy

bench: setup
	@$(PIP) -e '.[bench]'
	@$(BIN)/python benchmarks/cpu_vs_llamacpp.py
	@$(BIN)/python benchmarks/batching.py
	@$(BIN)/python benchmarks/http_vs_offline.py
	@$(BIN)/python benchmarks/request_walk.py
	@$(BIN)/python benchmarks/render.py

# A small language model from random weights, within ten minutes on an H200; PRESET=cpu is the same in small.
PRESET ?= h200
pretrain: setup
	@$(PIP) -e '.[train]'
	@$(BIN)/python examples/pretrain/run.py library --preset $(PRESET)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
