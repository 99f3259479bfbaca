# make run     install into .venv, then compile, generate and check a model on this host's CPU or GPU ranks
# make test    install into .venv, then the whole CPU test suite; of the CUDA part what was built is tested
# make test-all    the same with every family of models on ranks of its own, where make test has one of each archetype,
#     and with the forms, sizes and random draws of which make test has a part
# make test VERSIONS=newest|oldest    the tests that touch private parts of torch and transformers, with those versions
# make lint    what CI checks besides the tests
# make dist    wheels and the source distribution, in dist/, each checked in an empty environment
# make bench   all CPU benchmarks; writes benchmarks/results/cpu/ and benchmarks/RESULTS.md; QUICK=1: few cases, no files
# make hosts-demo    the examples on emulated hosts, by the README's commands for several hosts; needs root
# make gpu-test, make gpu-sanitize, make gpu-bench    on a GPU host that has torch already: its own Python, no network
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := run
.PHONY: run test test-all lint dist bench hosts-demo gpu-test gpu-sanitize gpu-bench clean FORCE

# pinned: requirements.txt; newest: what the registry has; oldest: the lower bounds of pyproject.toml. The latter two run
# the tests that touch private parts of torch and transformers, in environments of their own: 5 GB each, as PyPI's torch
# is built for CUDA. Another release or Python: make test VERSIONS=newest TORCH=torch==2.14.1 VENV=.venv-2.14.1, or
# PYTHON=python3.13 VENV=.venv-3.13.
VERSIONS ?= pinned
ifeq ($(VERSIONS),pinned)
VENV ?= .venv
TORCH ?= torch==2.13.0
REQUIREMENTS := requirements.txt
TESTS :=
else
VENV ?= .venv-$(VERSIONS)
REQUIREMENTS := requirements-$(VERSIONS).txt
TESTS := tests/experts/test_registration.py tests/generation/test_compiling.py tests/generation/test_left.py \
    tests/generation/test_sessions.py tests/generation/test_tokens.py tests/graph tests/inductor tests/integrations \
    tests/pipeline/test_capture.py tests/ops/test_all_reduce_norm.py tests/ops/test_captured_graphs.py \
    tests/ops/test_merged_linear.py \
    tests/rewrites/test_merged_gemm.py
# The registry's versions, whatever the pip of this host is told to prefer.
export PIP_CONSTRAINT := /dev/null
endif
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
BUILT := $(VENV)/.built
ASKED := $(VENV)/.asked
LINTERS := $(VENV)/.linters
NATIVE_SOURCES := $(shell find csrc -type f 2>/dev/null)
RANKS ?= $(shell $(BIN)/python -c "import os, torch; print(torch.cuda.device_count() or min(max(len(os.sched_getaffinity(0)), 2), 4))")
# Where bench and gpu-bench put their figures: benchmarks/results/$(MACHINE)/ (default: cpu and gpu)
MACHINE ?=
# 1: few small cases of every benchmark, and no result files
QUICK ?=
PYTEST_ARGS ?=
# That share the tests of make test
PROCESSES ?= 3
# The same of make gpu-test: programs mostly load and compile, so several fit on one GPU at a time
GPU_PROCESSES ?= 7
GENERATE_ARGS ?=
HOSTS_DEMO_ARGS ?=
DIST_ARGS ?=

# The distribution's Python first, where it can make an environment: it is built with more optimization than one that a
# version manager compiled on this host, and the tests are mostly Python.
PYTHONS := $(or $(PYTHON),/usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11)
RECENT := 'import sys; sys.exit(sys.version_info < (3, 11))'
# With what makes environments, and with the headers that native code needs. Of one that is only recent, the rules below
# say what it lacks.
WHOLE := 'import ensurepip, os, sys, sysconfig, venv; \
    sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'

# Exported so that ranks of one host share their cores instead of each taking all of them.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS
export TOKENIZERS_PARALLELISM := false
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A multicast object can put the GPUs of a shared host out of service: no target makes one.
export NCCL_NVLS_ENABLE := 0
export TORCH_SYMM_MEM_DISABLE_MULTICAST := 1
export NVSHMEM_DISABLE_NVLS := 1
# Nothing is compiled when it is installed: without caches every process would compile torch and transformers anew.
unexport PYTHONDONTWRITEBYTECODE

run: $(BUILT)
	$(BIN)/accelerate launch --config_file examples/configs/accelerate_one_host.yaml --num_processes $(RANKS) \
	    --main_process_port 0 examples/generate.py $(GENERATE_ARGS)

test: $(BUILT)
	@$(BIN)/python -c "from importlib.metadata import version; \
	    print('weaveopt: tests with', *(f'{name} {version(name)}' for name in ('torch', 'transformers', 'accelerate')))"
	$(BIN)/python -m pytest -p tests.ranks.processes --processes $(PROCESSES) --durations 25 \
	    --durations-min 1 -m "not gpu and not multigpu" $(TESTS) $(PYTEST_ARGS)

test-all: export WEAVE_TEST_ALL := 1
test-all: test

# Of what runs on GPUs alone, only that what it names is there.
NAMES_ONLY := $(addprefix --disable-error-code=,arg-type return-value dict-item no-any-return unused-ignore)

lint: $(BUILT) $(LINTERS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m benchmarks table --check
	rm -rf $(VENV)/typed
	$(BIN)/python setup.py -q build_py --build-lib $(VENV)/typed
	MYPYPATH=$(VENV)/typed $(BIN)/mypy -p weaveopt
	MYPYPATH=$(VENV)/typed $(BIN)/mypy --explicit-package-bases $(NAMES_ONLY) benchmarks distribution tests/gpu
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh' | xargs -r $(BIN)/clang-format --dry-run -Werror

dist: $(INSTALLED) requirements-dist.txt
	$(BIN)/python -m pip install -q -r requirements-dist.txt
	$(BIN)/python -m distribution.build $(DIST_ARGS)

bench: $(BUILT)
	$(BIN)/python -m benchmarks run --all --device cpu --machine $(or $(MACHINE),cpu) $(if $(QUICK),--quick)
	$(if $(QUICK),,$(BIN)/python -m benchmarks table)

hosts-demo: $(BUILT)
	$(BIN)/python -m tests.hosts.demo $(HOSTS_DEMO_ARGS)

gpu-test:
	WEAVE_CUDA=1 python3 -m pip install -q --no-build-isolation --no-deps -e .
	python3 -m pytest -p tests.ranks.processes --processes $(GPU_PROCESSES) --durations 25 --durations-min 1 \
	    -m "gpu or multigpu" $(PYTEST_ARGS)

# All kernels under each of CUDA's checkers, as ranks of one process on one GPU: racecheck and synccheck of CUDA 13.0 end
# with internal errors of their own where torch's kernels run too, and memcheck of three ranks or more was not seen to end.
# Then the op suite on two GPUs under memcheck. Checkers slow kernels down, so waits for peers get longer.
SANITIZERS ?= racecheck synccheck
gpu-sanitize:
	WEAVE_CUDA=1 python3 -m pip install -q --no-build-isolation --no-deps -e .
	export WEAVE_TIMEOUT_S=300; \
	for tool in $(SANITIZERS); do \
	    compute-sanitizer --tool $$tool --error-exitcode 9 python3 -m tests.gpu.one_process; \
	    compute-sanitizer --tool $$tool --error-exitcode 9 python3 -m tests.gpu.one_process_tiles; \
	    compute-sanitizer --tool $$tool --error-exitcode 9 python3 -m tests.gpu.one_process_hosts --groups 2x2; \
	done; \
	compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m tests.gpu.one_process --worlds 2; \
	compute-sanitizer --tool memcheck --target-processes all --kernel-name kns=weave --report-api-errors no \
	    --error-exitcode 9 python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.gpu.op_ranks --quick

# All GPU benchmarks; figures go to benchmarks/results/$(MACHINE)/. From a copy without git history: BENCHMARK_COMMIT=$(git rev-parse HEAD).
gpu-bench:
	python3 -m pip install -q --no-build-isolation --no-deps -e .
	python3 -m benchmarks run --all --device gpu --machine $(or $(MACHINE),gpu) $(if $(QUICK),--quick)
	$(if $(QUICK),,python3 -m benchmarks table)

$(INSTALLED): $(REQUIREMENTS) $(if $(filter newest,$(VERSIONS)),FORCE)
	@command -v g++ >/dev/null || { echo "weaveopt: g++ not found: install a C++17 compiler (apt install g++)" >&2; exit 1; }
	@python=; for candidate in $(PYTHONS); do \
	    "$$candidate" -c $(RECENT) 2>/dev/null || continue; \
	    if "$$candidate" -c $(WHOLE) 2>/dev/null; then python=$$candidate; break; fi; \
	    python=$${python:-$$candidate}; \
	done; \
	if [ -z "$$python" ]; then echo "weaveopt: no Python of at least 3.11 found: install python3.13, or name one with PYTHON=" >&2; exit 1; fi; \
	"$$python" -c 'import os, sysconfig; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
	    || { echo "weaveopt: Python.h of $$python not found: install its headers (apt install python3-dev)" >&2; exit 1; }; \
	"$$python" -m venv $(VENV) \
	    || { echo "weaveopt: $$python cannot make an environment: install its venv module (apt install python3-venv)" >&2; exit 1; }
	@# Of ten thousand files a third is ever imported, and Python compiles those then.
	$(if $(TORCH),$(BIN)/python -m pip install -q --no-compile $(TORCH))
	@# torch again: else pip takes an older one where a requirement does not fit this one.
	@$(BIN)/python -m pip install -q --no-compile $(if $(filter newest,$(VERSIONS)),--upgrade) $(TORCH) -r $(REQUIREMENTS) \
	    || { echo "weaveopt: pip could not install $(REQUIREMENTS): it needs a registry and, with CUDA builds of torch, \
	6 GB of disk" >&2; exit 1; }
	touch $@

# What the environment asks setup.py to build; a new file, with another text, only when that changes.
$(ASKED): FORCE | $(INSTALLED)
	@asked='WEAVE_CUDA=$(WEAVE_CUDA) WEAVE_CUDA_ARCHS=$(WEAVE_CUDA_ARCHS) CUDA_HOME=$(CUDA_HOME)'; \
	[ "$$(cat $@ 2>/dev/null)" = "$$asked" ] || echo "$$asked" > $@

# Python sources are used in place; only native code, metadata and new top-level folders need this again.
$(BUILT): $(INSTALLED) $(ASKED) setup.py pyproject.toml $(NATIVE_SOURCES)
	$(BIN)/python -m pip install -q --no-build-isolation --no-deps -e .
	@$(BIN)/python -c "from weaveopt._native import has_cuda; has_cuda or print('weaveopt: built without its CUDA part, \
	as there is no GPU or no nvcc here, or WEAVE_CUDA=0; WEAVE_CUDA_ARCHS=all builds it for every GPU')"
	touch $@

$(LINTERS): requirements-lint.txt $(INSTALLED)
	$(BIN)/python -m pip install -q -r requirements-lint.txt
	touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info weaveopt/_native*.so
