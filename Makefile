# What torch is installed as. It comes first: whatever depends on torch would else choose one.
TORCH ?= torch==2.13.0
PYTHON ?= python3
PYTEST_ARGS ?=

# OpenMP threads that wait by sleeping: spinning ones starve every other process on a small machine.
export OMP_WAIT_POLICY = PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export HOTBUNK_PURE

BIN := .venv/bin
# What the environment was made from; when it changes, the environment is brought up to date.
KEY := $(shell { echo '$(TORCH)|$(PYTHON)|$(CURDIR)|$(HOTBUNK_PURE)'; find pyproject.toml csrc -type f \
	\( -name '*.toml' -o -name '*.[ch]' -o -name '*.[ch]pp' -o -name '*.cu' -o -name '*.cuh' \
	-o -name CMakeLists.txt -o -name '*.cmake' \) -not -path '*/CMakeFiles/*' \
	-not -name cmake_install.cmake -print | sort | xargs sha256sum; } | sha256sum | cut -c1-16)
STAMP := .venv/.made-from-$(KEY)

# An engine of engines/*.txt, in an environment of its own beside .venv.
ENGINE ?= vllm
ENGINE_BIN := .venv-$(ENGINE)/bin

.PHONY: help venv test native-test check lint types layers format demo wheel clean engine-venv engine-bin test-engines soak

help:
	@echo 'make venv    the environment in .venv, with an editable install'
	@echo 'make test    the tests (PYTEST_ARGS="-k name" for some of them)'
	@echo '             HOTBUNK_PURE=1: without the native library, what can be had then'
	@echo 'make native-test  the C tests alone, under sanitizers; part of make test'
	@echo 'make check   ruff, mypy, layers'
	@echo 'make format  let ruff rewrite the files'
	@echo 'make soak    storms and state machines, ten times over'
	@echo 'make demo    a short training run into runs/demo'
	@echo 'make wheel   sdist and wheels into dist/, each installed and tried in a bare environment'
	@echo 'make clean   remove what the others made'
	@echo
	@echo 'with a real engine (ENGINE=vllm):'
	@echo 'make engine-venv    its environment, .venv-ENGINE; what it needs is kept outside the checkout'
	@echo 'make test-engines   the tests of its adapter, with the conformance suite'
	@echo 'make -s engine-bin  the path of the hotbunk command that has it'
	@echo 'make soak           (with ENGINE=vllm) each deployment through the suite; cycles and kills'

venv: $(STAMP)
	@:

$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -qq '$(TORCH)'
	$(BIN)/pip install -qq -e '.[torch,smollm2,dev]'
	rm -f .venv/.made-from-*
	touch $@

# What a pure install promises: everything but releasing memory, which most other tests do.
PURE_TESTS := tests/unit tests/integration/shm/test_faults.py $(addprefix tests/integration/test_,\
	conformance_reference.py collective_sync.py reference_device.py reference_sampling.py sharded_source.py \
	sources_of_updates.py sync_drill.py sync_faults_between_processes.py syncs_between_processes.py train.py) \
	$(addprefix --deselect=tests/integration/test_train.py::,test_a_run_directory_is_whole test_memory_really_changes_hands)

# Two files at a time: most tests wait for processes. PYTEST_ARGS='-n 0' is one, as a debugger needs.
test: venv $(if $(HOTBUNK_PURE),,native-test)
	$(BIN)/pytest -n 2 --dist loadfile $(if $(HOTBUNK_PURE),$(PURE_TESTS)) $(PYTEST_ARGS)

# The C tests, under both kinds of sanitizer: they cannot share a build.
native-test: export PATH := $(CURDIR)/$(BIN):$(PATH)
native-test: venv
	@set -e; for sanitizers in address,undefined thread; do \
		out=build/native-$${sanitizers%%,*}; \
		cmake -S csrc -B $$out -G Ninja -DHB_TESTS=ON -DHB_SANITIZE=$$sanitizers >/dev/null; \
		cmake --build $$out --target native_tests | tail -n 1; \
		ctest --test-dir $$out --output-on-failure --no-tests=error; \
	done

check: lint types layers

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: venv
	$(BIN)/mypy

layers: venv
	$(BIN)/lint-imports --no-cache

format: venv
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

demo: venv
	rm -rf runs/demo
	$(BIN)/hotbunk train out=runs/demo

wheel: venv
	bash scripts/check_wheel.sh

engine-venv: venv
	@bash scripts/engine_venv.sh '$(ENGINE)'

engine-bin:
	@$(MAKE) --no-print-directory engine-venv >&2
	@echo '$(CURDIR)/$(ENGINE_BIN)/hotbunk'

# What would take CI too long: the storms and state machines, ten times over; or, where an engine is named,
# every deployment of it.
ifeq ($(origin ENGINE),file)
soak: venv
	@bash scripts/soak.sh $(BIN)/pytest $(PYTEST_ARGS)
else
soak: export OMP_NUM_THREADS = 1
soak: engine-venv
	@bash scripts/soak_$(ENGINE).sh $(ENGINE_BIN) $(PYTEST_ARGS)
endif

# One OpenMP thread: with two, each waits for the other whenever something else wants a core.
test-engines: export OMP_NUM_THREADS = 1
test-engines: engine-venv
	$(ENGINE_BIN)/pytest tests/engines/$(ENGINE) $(PYTEST_ARGS)

clean:
	rm -rf .venv .venv-* build dist src/hotbunk/_native
	rm -rf csrc/.cmake csrc/CMakeCache.txt csrc/CMakeFiles csrc/CMakeInit.txt csrc/build.ninja \
		csrc/Makefile csrc/.ninja_deps csrc/.ninja_log csrc/.skbuild-info.json csrc/install_manifest*.txt
	find csrc \( -name cmake_install.cmake -o -name CMakeFiles \) -prune -exec rm -rf {} +
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
