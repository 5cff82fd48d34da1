# Each target does all of its own set-up; python3, make and a C compiler are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# For test-torch: the oldest torch that is supported, unless another one is given.
VERSION ?= 2.4.1

.DELETE_ON_ERROR:
.PHONY: help demo test test-fast test-torch check docs generate bench screenshots clean

help:
	@echo "make demo         train on 4 CPU ranks and open the dashboard on them"
	@echo "make test         run the tests"
	@echo "make test-fast    run those that start no ranks, terminals or browser"
	@echo "make test-torch   run those with real ranks on another torch, such as VERSION=2.15.0"
	@echo "make check        ruff, mypy and a list of words that users must not meet"
	@echo "make docs         build the documentation into build/docs; a broken link fails"
	@echo "make generate     write the parts of docs/ anew that come from the code"
	@echo "make bench        print what ddpwatch costs on this machine"
	@echo "make screenshots  write screenshots/ anew"
	@echo "make clean        remove everything that these made"

# torch is pinned exactly: that version installs as a CPU build, a range would pull in gigabytes of CUDA.
$(READY): pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

demo: $(READY)
	@$(BIN)/ddpwatch demo

# Bytecode is kept here and for the benchmarks, whatever the environment says: else each process compiles all our code
# anew, which an installed ddpwatch never does. Four workers are for two cores: they often wait for ranks and screens.
test: $(READY)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4

test-fast: $(READY)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 4 -m "not real"

test-torch: .venv-torch-$(VERSION)/.ready
	@PYTHONDONTWRITEBYTECODE= $(<D)/bin/python -m pytest -n 4 tests/agent tests/ddp tests/faults tests/test_examples.py

.venv-torch-%/.ready: pyproject.toml requirements-dev.txt
	$(PYTHON) -m venv $(@D)
	sed 's/^torch==.*/torch==$*/' requirements-dev.txt > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $(@D)/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --editable .
	@touch $@

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.prose

# Not with --quiet, which hides warnings from --strict, too. The variable silences an advertisement of the theme.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "open build/docs/index.html"

generate: $(READY)
	@$(BIN)/python -m docs.generate

bench: $(READY)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m benchmarks

screenshots: $(READY)
	@$(BIN)/python -m screenshots.make

clean:
	rm -rf $(VENV) .venv-torch-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
