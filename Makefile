# Everything starts here: `make demo` sets up and runs the main job, `make test` sets up and passes the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Python compiles what is imported when it is first imported; all of what is installed would take as long as its download.
# It must keep what it compiled: else each process compiles torch anew, which takes longer than its import.
unexport PYTHONDONTWRITEBYTECODE
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
# What is installed: first torch; then what Transect needs to run, or all that tests and checks need too. The C++ kernels
# are compiled meanwhile, because torch brings what that needs.
# Each process of the tests imports all test files: Python compiles what they import here, once.
TORCH  := $(VENV)/.torch
RUN    := $(VENV)/.installed
DEV    := $(VENV)/.installed-dev
BUILT  := $(VENV)/.built
READY  := $(VENV)/.imported

.PHONY: setup setup-dev install-dev demo browser test prove test-triton lint types resolve bench pretrain clean
setup: $(RUN) $(BUILT)
install-dev: $(DEV) $(BUILT)
setup-dev: install-dev $(READY)

$(TORCH): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Transect needs Python 3.11 or newer: set PYTHON=python3.11")'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python .ci/download_size.py run $(VENV)
	@$(PIP) torch numpy
	@touch $@

$(RUN): $(TORCH)
	@$(PIP) -e .
	@touch $@

$(BUILT): $(TORCH)
	@PYTHONPATH=src $(BIN)/python -m transect.ops.cpu.build
	@touch $@

# Two pips must not change one environment at the same time: with a goal that needs RUN, DEV waits for it.
$(DEV): $(TORCH) $(if $(filter setup demo bench pretrain,$(MAKECMDGOALS)),$(RUN))
	@$(BIN)/python .ci/download_size.py test $(VENV)
	@$(PIP) -e '.[test,lint]'
	@touch $(RUN) $@

$(READY): $(DEV)
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || true
	@touch $@

demo: setup
	@$(BIN)/transect demo

# A browser for the tests of the page, which are skipped without one. Root on Debian or Ubuntu gets it by apt-get.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  echo "no Chromium here: the tests of the page will be skipped"

# Two processes share the tests. `make test WORKERS=0` runs all in one.
WORKERS ?= 2
test: setup-dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Everything: also the cross products, long searches and slow machinery that `make test` leaves out.
prove: setup-dev
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --prove

# The kernels under another Triton than the installed one: in the interpreter, and compiled ahead of time.
TRITON ?= 3.6.0
OTHER   = $(VENV)/triton-$(TRITON)
test-triton: setup-dev
	@test -d $(OTHER) || $(BIN)/python -m pip install --quiet --no-deps --target $(OTHER) triton==$(TRITON)
	@PYTHONPATH=$(OTHER) $(BIN)/python -m pytest tests/ops -n $(WORKERS) --dist loadfile

# Whether the constraints resolve from the public package index; reads metadata, installs nothing.
resolve: $(DEV)
	@$(BIN)/python -m pytest tests/packaging/public_index.py -n 4 --dist load

lint: $(DEV)
	@$(BIN)/ruff check .ci src tests benchmarks examples recipes hatch_build.py
	@$(BIN)/ruff format --check .ci src tests benchmarks examples recipes hatch_build.py
	@$(BIN)/lint-imports

# Tests that run at the same time go first: they take longer.
types: $(DEV)
	@nice -n 19 $(BIN)/mypy

bench: setup
	@$(PIP) -e '.[bench]'
	@$(BIN)/python benchmarks/engine/cpu_vs_llamacpp.py
	@$(BIN)/python benchmarks/engine/batching.py
	@$(BIN)/python benchmarks/server/http_vs_offline.py
	@$(BIN)/python benchmarks/server/request_walk.py
	@$(BIN)/python benchmarks/render.py

# A small language model from random weights, within ten minutes on an H200; PRESET=cpu is the same in small.
PRESET ?= h200
pretrain: setup
	@$(PIP) -e '.[train]'
	@$(BIN)/python examples/pretrain/run.py library --preset $(PRESET)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
