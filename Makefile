# Everything a contributor needs. `make help` lists the targets.
#   PYTHON   the interpreter that .venv is made from: 3.11 to 3.13
#   ARGS     passed on, for example: make test ARGS="tests/unit -k block_pool"
#   JOBS     processes that run the tests, each with files of its own

PYTHON ?= python3
ARGS ?=
JOBS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/package
HOST_PACKAGE := $(VENV)/package-for-this-machine
STAMP := $(VENV)/installed
NATIVE := $(wildcard csrc/cpu/*.cpp csrc/cpu/*.h csrc/cpu/isa/*.cpp csrc/cpu/isa/*.h)
SOURCES := vllm_lite scripts examples benchmarks tests

# For processors of Arm, which qemu-user emulates: kernels, and the tests that call nothing else.
CROSS := aarch64-linux-gnu-g++
ARM := build/aarch64
ARM_TESTS := $(addprefix tests/cpu/test_,$(addsuffix .py,attention_cpu attention_order cache_ops_cpu delta_rule \
  elementwise_cpu experts_cpu fused_cpu gguf_blocks int8_cache linear lora_cpu mamba masks_cpu native_grouped \
  native_linear native_sampler native_tables shared_prefixes_cpu))

# What `make quick` leaves out of tests/unit: files that start processes, wait, or take some seconds. And what it adds.
SLOW := bench_result chat_template cli conversion cut_calls deadlines demo_grammar detokenizer doctor fetch_images gpu_check \
        gpu_check_carried gpu_check_stages groupings hub hub_cache import_time instances launch leaks orphans peers planner \
        published_configs recorded_process recovery_properties replay response_formats scheduler_properties server_connection \
        server_cut_streams server_rendering server_unpack session session_recovery simulate simulated_executor \
        structured_tools supervise supervisor torch_import trace untrusted_files
QUICK := $(filter-out $(SLOW:%=tests/unit/test_%.py),$(wildcard tests/unit/test_*.py)) \
         $(wildcard tests/cpu/test_input_batch.py tests/cpu/test_logit_rules.py tests/cpu/test_cache_engine.py)

.DEFAULT_GOAL := help
.PHONY: help venv demo test quick arm real test-wheel coverage check format protocol docs node-client bench clean
.DELETE_ON_ERROR:

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP)  ## make .venv and install the package and its tools into it (instant when up to date)

# The package is installed in place: Python files are used where they are, and only what this depends on is built again.
# For the demo it is compiled for this machine's processor alone, in a quarter of the time, unless it is there already.
$(PACKAGE) $(HOST_PACKAGE): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "vllm_lite needs Python 3.11 to 3.13 as $(PYTHON); name another with: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	  { echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "installing torch and other packages, then compiling the kernels: about a minute"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	  $(if $(filter $(HOST_PACKAGE),$@),-C cmake.define.VLLM_LITE_ISAS=host) -e .
	@$(BIN)/python -c 'from vllm_lite.kernels import cpu; cpu.available()'  # says so if they were not built
	@extra=$$($(BIN)/python scripts/gpu_extra.py); if test -n "$$extra"; then echo "for this machine's GPU: $$extra"; \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$$extra]"; fi
	@touch $@

# What tests and checks need beside it, by name: the package is not built again.
$(STAMP): $(PACKAGE)
	@$(BIN)/python -c 'import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	  print(*extras["test"], *extras["dev"], sep="\n")' > $(VENV)/extras.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r $(VENV)/extras.txt
	@touch $@

demo: $(or $(wildcard $(PACKAGE)),$(HOST_PACKAGE))  ## start the engine, stream a text from the bundled model, print what it cost
	$(BIN)/python scripts/demo.py $(ARGS)

test: $(STAMP)  ## run the whole test suite
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

quick: $(STAMP)  ## lint and the tests that take less than a minute
	$(BIN)/ruff check --quiet $(SOURCES)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -q $(QUICK) $(ARGS)

arm: $(STAMP)  ## compile the kernels for Arm and test them on an emulated processor (g++-aarch64-linux-gnu, qemu-user)
	$(BIN)/cmake -S . -B $(ARM) -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=$(CROSS)
	$(BIN)/cmake --build $(ARM) --parallel $(JOBS)
	$(CROSS) -std=c++17 -O1 -Wall -Wextra -rdynamic tests/arm/guest.cpp -o $(ARM)/guest -ldl
	$(BIN)/python -m pytest -n0 -q tests/cpu/test_arm.py
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -p tests.arm.plugin --timeout 1200 -k 'not foreign_library' $(ARM_TESTS) $(ARGS)

real: $(STAMP)  ## fetch real checkpoints, tokenizers and templates into the user's cache, test with them
	$(BIN)/python scripts/fetch_real.py
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile tests/real $(ARGS)

test-wheel: $(STAMP)  ## build the wheel, install it elsewhere, run the suite against it
	PYTHON=$(PYTHON) .ci/test-wheel -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: $(STAMP)  ## branch coverage of the package by tests/unit and tests/cpu, as a table for each folder
	@mkdir -p build
	$(BIN)/python -m coverage run -m pytest -q tests/unit tests/cpu $(ARGS)
	$(BIN)/python scripts/coverage_table.py benchmarks/results/coverage.md

check: $(STAMP)  ## lint, formatting and types
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/python -m mypy
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror

format: $(STAMP)  ## rewrite the sources as `make check` wants them
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

protocol: $(STAMP)  ## write docs/protocol.md and its JSON Schema anew, after a change of a message
	$(BIN)/python scripts/protocol_docs.py

docs: $(STAMP)  ## write the tables in the documents anew, after files or folders have moved
	$(BIN)/python scripts/docs_tables.py

node-client:  ## fetch what the Node.js client needs, for the test that runs it, and axe for the page's
	cd scripts/node && npm ci --ignore-scripts --no-audit --no-fund

bench: $(STAMP)  ## measure the engine's own cost, without a model
	$(BIN)/vllm-lite bench engine $(ARGS)

clean:  ## remove everything that was made here, .venv included
	rm -rf scripts/node/node_modules $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +
