# make test | make test-quick | make golden | make demo | make bench | make soak | make clean
# Everything is made under .venv, .venv-engines and build; nothing else on the machine changes,
# except that root gets missing system packages with apt-get.

VENV := .venv
PY := $(VENV)/bin/python
RUN := $(VENV)/bin
REPORTS := build/reports
# Other versions of the engines than those that are pinned: make test-engines VLLM=0.33.0 SGLANG=0.5.22
VLLM :=
SGLANG :=
ENGINES := .venv-engines$(if $(VLLM),-vllm-$(VLLM))$(if $(SGLANG),-sglang-$(SGLANG))
CXX_FILES := $(shell git ls-files 'cpp/*.h' 'cpp/*.cpp' 'cpp/*.cu' 'cpp/*.cuh' 'tests/*.cpp' 'tests/*.h')
CMAKE_FILES := $(shell git ls-files '*CMakeLists.txt' '*.cmake')
# What a compiler has to find, and the packages that hold it on Debian and Ubuntu.
SYSTEM_HEADERS := gtest/gtest.h benchmark/benchmark.h Python.h
SYSTEM_PACKAGES := g++ libgtest-dev libbenchmark-dev python3-dev python3-venv
export PATH := $(abspath $(RUN)):$(PATH)

.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: all test test-quick golden lint test-cpp test-python test-engines test-sglang test-vllm engines \
  versions tally install system tools bench soak demo fuzz sanitized test-sanitized wheel wheels other-torch clean
all: test

# All groups run, whatever becomes of the others; the tally says which of them failed. A group that
# passed leaves a file behind.
GROUPS := lint cpp-plain cpp-asan cpp-tsan test-sanitized test-python test-sglang test-vllm
passed = @mkdir -p $(REPORTS) && touch $(REPORTS)/$(@:test-%=%).passed

test:
	rm -rf $(REPORTS)
	@$(MAKE) --no-print-directory --keep-going $(GROUPS) || echo "make: not all groups passed" >&2
	@$(MAKE) --no-print-directory tally

test-quick: lint cpp-asan
	$(RUN)/pytest -n 2 --quick

$(VENV)/.ready: pyproject.toml tests/dev_requirements.py
	@$(MAKE) --no-print-directory system
	test -x $(PY) || python3 -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) tests/dev_requirements.py | $(PY) -m pip install -q -r /dev/stdin
	touch $@

install: $(VENV)/.ready
	STATECACHE_OPS=ON $(PY) -m pip install -q --no-build-isolation --no-deps .

system:
	@python=$$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])'); \
	python3 -c 'import ensurepip' 2>/dev/null && \
	  printf '#include <%s>\n' $(SYSTEM_HEADERS) | c++ -std=c++20 -I"$$python" -E -x c++ - \
	  >/dev/null 2>&1 && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get -q update && apt-get -q install -y --no-install-recommends $(SYSTEM_PACKAGES); \
	else \
	  echo "make: a compiler or a header is missing; install $(SYSTEM_PACKAGES)" >&2; exit 2; \
	fi

# A browser and promtool, which some tests of Python need; what cannot be had is said, and the tests
# are skipped then: the tally does not pass.
tools: $(VENV)/.ready
	tests/install_tools.sh $(RUN)

lint: install
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/codespell .
	$(RUN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(RUN)/cmake-format --check $(CMAKE_FILES)
	$(RUN)/mypy
	$(PY) -m mypy.stubtest statecache._index statecache._blocks --allowlist tests/stub_allowlist.txt
	$(RUN)/lint-imports --no-logo
	$(passed)

# Plain, under AddressSanitizer with UBSan, and under ThreadSanitizer. The plain build also runs the
# register check of the CUDA kernels.
CPP_BUILDS := cpp-plain cpp-asan cpp-tsan
cpp-asan: SANITIZE := address,undefined
cpp-tsan: SANITIZE := thread
# Optimised less under the sanitizers, with no more debug information than their reports show:
# either costs as much to compile as the rest. The checkpoint copies keep their -O3.
CPP_FLAGS = $(if $(SANITIZE),-O1,-O2) -g1
.PHONY: $(CPP_BUILDS)

$(CPP_BUILDS): $(VENV)/.ready
	cmake -S . -B build/$@ -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSTATECACHE_TESTS=ON \
	  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="$(CPP_FLAGS)" -DSTATECACHE_SANITIZE=$(SANITIZE) \
	  -DPython_EXECUTABLE=$(abspath $(PY)) >/dev/null
	cmake --build build/$@
	mkdir -p $(REPORTS)
	ctest --test-dir build/$@ -j 2 --output-on-failure --no-tests=error \
	  --output-junit $(abspath $(REPORTS))/$@.xml
	$(passed)

test-cpp: $(CPP_BUILDS)

test-python: install tools
	mkdir -p $(REPORTS)
	$(RUN)/pytest -n 2 --dist worksteal --junit-xml=$(REPORTS)/python.xml
	$(passed)

# The real engines on the CPU, in an environment of their own: their cache layers and whole servers,
# one engine after the other, its files shared out over two processes, the longest one first.
test-engines: test-sglang test-vllm

longest_first = tests/engines/$*/test_server.py \
  $(filter-out %/test_server.py,$(wildcard tests/engines/$*/test_*.py))
test-sglang test-vllm: test-%: engines
	mkdir -p $(REPORTS)
	$(ENGINES)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  $(longest_first) --junit-xml=$(REPORTS)/$*.xml
	$(passed)

# A million requests through the cache layers of both engines, each in several ways, one engine a
# core; at most so many seconds an engine. `make test` has a form of it that takes some seconds.
# SOAK_KINDS="bursts of siblings": those alone, requests that wait for one another's state.
SOAK_REQUESTS := 1000000
SOAK_SECONDS := 7200
SOAK_KINDS :=
soak: engines
	printf '%s\n' sglang vllm | xargs -P 2 -I '{}' env PYTHONPATH=tests:tests/engines/{}/standins \
	  $(ENGINES)/bin/python -W ignore tests/engines/{}/test_soak.py --requests $(SOAK_REQUESTS) --seconds $(SOAK_SECONDS) \
	  --kinds "$(SOAK_KINDS)"

engines: $(VENV)/.ready
	VLLM=$(VLLM) SGLANG=$(SGLANG) tests/engines/install.sh $(ENGINES)

# The tests of every version that an adapter is for, as the table of docs/compatibility.md: hours.
# make versions ONLY="vllm=0.31.0 vllm=0.33.0 seams differential": these, and these columns
ONLY :=
versions: engines
	python3 tests/engines/versions.py $(ONLY)

# Counts what passed, by group, and fails when any of it failed, was skipped or has vanished.
tally:
	@python3 tests/tally.py $(REPORTS) $(GROUPS:test-%=%)

# The published numbers on excerpts of the recorded traces; with TRACES=FOLDER on the whole ones too,
# which lie there as agent_coding.jsonl.gz and conversation.jsonl.gz (docs/traces.md).
TRACES := traces
golden: install
	@[ "$(origin TRACES)" != "command line" ] || [ -f "$(TRACES)/agent_coding.jsonl.gz" ] || \
	  { echo "make: there is no agent_coding.jsonl.gz in $(TRACES)" >&2; exit 2; }
	STATECACHE_TRACES=$(abspath $(TRACES)) $(RUN)/pytest -n 2 tests/golden

bench: install
	cmake -S . -B build/cpp-bench -G Ninja -DCMAKE_BUILD_TYPE=Release -DSTATECACHE_BENCH=ON
	cmake --build build/cpp-bench
	build/cpp-bench/tests/cpp/statecache_bench
	$(RUN)/pytest tests/bench/bench_index.py tests/bench/bench_metrics.py --benchmark-enable --benchmark-timer=time.thread_time \
	  --benchmark-disable-gc --benchmark-columns=median,iqr,rounds

# The Python tests of index and queues on extensions built with AddressSanitizer and UBSan: in full,
# and within `make test` with a tenth of the random events. Leaks are not looked for: Python itself
# has some.
SANITIZED := build/sanitized
SANITIZED_TESTS := $(patsubst %,tests/unit/index/test_%.py,index_rules learned_rules keyed_index policies \
  block_queues reuse_queue block_hash_index) $(patsubst %,tests/unit/replay/test_%.py,weighted_gds online \
  state_slots split_pool shared_pool) tests/unit/test_package.py \
  $(patsubst %,tests/property/test_%.py,index_against_reference learned_against_reference \
  learned_determinism reuse_queue fifo_queue pools determinism)
SANITIZED_PYTHON := LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(abspath $(SANITIZED))/python $(PY)
sanitized: install
	cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo \
	  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DSTATECACHE_PYTHON=ON -DSTATECACHE_OPS=OFF \
	  -DSTATECACHE_SANITIZE=address,undefined -DPython_EXECUTABLE=$(abspath $(PY)) \
	  -Dpybind11_DIR=$$($(PY) -m pybind11 --cmakedir) >/dev/null
	cmake --build $(SANITIZED) --target _index _blocks
	rm -rf $(SANITIZED)/python && mkdir -p $(SANITIZED)/python
	cp -r plugin/statecache $(SANITIZED)/python
	cp $(SANITIZED)/cpp/_index*.so $(SANITIZED)/cpp/_blocks*.so $(SANITIZED)/python/statecache
	$(SANITIZED_PYTHON) -c 'from statecache import _blocks, _index; \
	  assert all("$(SANITIZED)" in module.__file__ for module in (_blocks, _index))'
	mkdir -p $(REPORTS)
	$(SANITIZED_PYTHON) -m pytest -n 2 $(QUICK) $(SANITIZED_TESTS) \
	  --junit-xml=$(REPORTS)/sanitized.xml

test-sanitized: QUICK := --quick
test-sanitized: sanitized
	$(passed)

# Ten minutes of each fuzzer, one after the other, guided by coverage. Findings lie in build/fuzz.
SECONDS := 600
fuzz: install
	$(PY) -m pip install -q atheris==3.0.0
	mkdir -p build/fuzz/index
	cmake -S . -B build/cpp-fuzz -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DSTATECACHE_TESTS=ON \
	  -DCMAKE_CXX_FLAGS_RELWITHDEBINFO="-O1 -g1" -DSTATECACHE_FUZZ=ON \
	  -DSTATECACHE_SANITIZE=address,undefined -DPython_EXECUTABLE=$(abspath $(PY)) >/dev/null
	cmake --build build/cpp-fuzz --target index_fuzz
	build/cpp-fuzz/tests/cpp/fuzz/index_fuzz $(SECONDS)s tests/cpp/fuzz/corpus build/fuzz/index
	for target in trace convert settings; do \
	  $(PY) tests/fuzz/run.py $$target $(SECONDS) tests/fuzz/corpus/$$target || exit 1; done

# For this Python, with the copies for torch from 2.13 on, and CUDA kernels where there is an nvcc.
# What is in it stands beside it.
wheel: $(VENV)/.ready
	rm -rf dist && mkdir -p dist
	STATECACHE_OPS=ON $(PY) -m pip wheel -q --no-build-isolation --no-deps -w dist .
	for wheel in dist/*.whl; do $(PY) tests/packaging/wheel_contents.py $$wheel >$$wheel.cdx.json || exit 1; done
	@ls -l dist

# One for each Python of PYTHONS that is here (python3.12 on the PATH, pyenv's or uv's), each tested
# where it is installed; those that are not here are named. `make wheel` keeps the list of contents.
PYTHONS := 3.11 3.12 3.13
wheels: $(VENV)/.ready
	$(PY) tests/packaging/build_wheels.py $(PYTHONS)

# The copies of that wheel under another torch than the one it was built with: torch's stable ABI.
OTHER_TORCH := 2.14.1
COPIES_TESTS := tests/unit/checkpoint/test_ops.py tests/unit/checkpoint/test_ops_loading.py \
  tests/unit/checkpoint/test_ops_refusals.py tests/unit/checkpoint/test_pool.py \
  tests/unit/checkpoint/test_reference.py tests/property/test_checkpoint_error.py tests/property/test_pools.py
other-torch: wheel
	rm -rf build/other-torch && $(PY) -m venv build/other-torch
	build/other-torch/bin/python -m pip install -q torch==$(OTHER_TORCH) numpy pytest pytest-benchmark hypothesis dist/*.whl
	build/other-torch/bin/python -c 'import torch; print("torch", torch.__version__)'
	build/other-torch/bin/python -m pytest -q $(COPIES_TESTS)

demo: install
	mkdir -p out
	$(RUN)/statecache generate agent --sessions 64 --turns 40 --seed 0 -o out/agent.jsonl.gz
	$(RUN)/statecache replay out/agent.jsonl.gz --policy lru --policy gds \
	  --slots 64,128,256,512,1024 --json out/replay.json --plot out/replay.png
	@echo "Results: out/replay.json, plot: out/replay.png"
	$(MAKE) --no-print-directory engines
	$(ENGINES)/bin/python tests/demo/serve_agents.py out

clean:
	rm -rf build out dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
