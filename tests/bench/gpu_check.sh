#!/bin/sh
# Builds statecache with its CUDA kernels, tests them and measures them, in under five minutes on one
# GPU. Usage: tests/bench/gpu_check.sh [PYTHON], in an environment with torch >= 2.13 for CUDA,
# pytest and scikit-build-core, pybind11. Without a GPU: the parts that need none, then exit 0.
set -eu
cd "$(dirname "$0")/../.."
python=${1:-python3}

echo "== kernels compile without spills"
"$python" tests/cpp/checkpoint/check_kernels.py || {
  code=$?
  [ "$code" -eq 77 ] || exit "$code"
}

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "== no GPU here: the kernels were not run, nothing was measured"
  exit 0
fi

echo "== build for this GPU"
architecture=$("$python" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())')
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
"$python" -m pip install --quiet --no-deps --no-build-isolation --target "$target/site" \
  -C "build-dir=$target/build" \
  -C cmake.define.STATECACHE_CUDA=ON -C cmake.define.STATECACHE_OPS=ON \
  -C "cmake.define.CMAKE_CUDA_ARCHITECTURES=$architecture-real" .
PYTHONPATH="$target/site${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH

echo "== tests"
"$python" -m pytest -q -o addopts= tests/gpu

echo "== bytes a second, against a device-to-device copy and against plain torch"
"$python" tests/bench/bench_checkpoint.py --device cuda --dtypes bf16 fp32 --slots 1 8 64
