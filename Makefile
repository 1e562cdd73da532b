# Everything a person or CI types. `.venv` is made on first use.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test faults check format demo-checkpoint clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/installed        ## a real job on the embedded defaults, from a fresh clone
	$(BIN)/python examples/demo/run_demo.py

test: .venv/installed .cache/peer   ## every test; PostgreSQL and Redis must run locally (or skip)
	$(BIN)/python -m pytest

faults: .venv/installed      ## break workers and servers at length, count rows, write the table into docs/reliability.md
	FAULT_REPORT=docs/reliability.md $(BIN)/python -m pytest tests/faults -m "faults or not faults"

check: .venv/installed       ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker/compose.yaml

demo-checkpoint: .venv/installed   ## train the demo's checkpoint again, some minutes on a CPU
	$(BIN)/python examples/demo/train.py

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The public package that answers are compared with. It shares our import name, so it lives in a folder of its own.
.cache/peer: .venv/installed
	$(BIN)/pip install --quiet --no-deps --target $@ laya==0.4.15 || echo "offline: the parity tests against the public package will be skipped"

clean:
	rm -rf .venv .cache
