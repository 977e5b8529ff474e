# Every target first brings .venv up to date; a second run finds the stamp and starts at once.
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || echo python3)
BIN := .venv/bin

.DEFAULT_GOAL := check
.PHONY: check test test-long test-all slow chaos lint types imports demo examples bench clean

check: test test-long lint types imports

test: .venv/.stamp
	$(BIN)/pytest

# Jobs of several ranks, programs and kernels from start to end: the tests with a time limit of their own.
test-long: .venv/.stamp
	$(BIN)/pytest -m "long and not slow and not chaos"

test-all: .venv/.stamp
	$(BIN)/pytest -m ""

# Those that take minutes; `make examples` runs the examples.
slow: .venv/.stamp
	$(BIN)/pytest -m "slow and not chaos" --ignore tests/examples

# Long runs under a killer; CHAOS_SEEDS=20 for more of them.
chaos: .venv/.stamp
	$(BIN)/pytest -m chaos -rP

lint: .venv/.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/.stamp
	$(BIN)/mypy

imports: .venv/.stamp
	$(BIN)/lint-imports

demo: .venv/.stamp
	$(BIN)/python examples/demo.py

# Those that take minutes; the others are run by `make test` and `make test-long`.
examples: .venv/.stamp
	$(BIN)/pytest -m slow -k "not demo" tests/examples

# All of it takes about 100 minutes. For a part of it: make bench BENCH='--workloads overhead --contestants aioloader,dataloader-map'
bench: .venv-bench/.stamp
	.venv-bench/bin/python -m tests.benchmarks $(BENCH)

clean:
	rm -rf .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find aioloader adapters tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.stamp: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -c constraints-cpu.txt
	touch $@

.venv-bench/.stamp: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet --disable-pip-version-check -e '.[bench]' -c constraints-cpu.txt
	touch $@
