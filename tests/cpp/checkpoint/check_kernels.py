"""Compile the CUDA kernels for each architecture; fail on any register spill or stack frame.

nvcc comes from the PATH, else from the nvidia-cuda-nvcc wheel. Without either it is a skip with its
reason (exit code 77), and with CI=true a failure.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ARCHITECTURES = (80, 90, 100, 120)
KERNELS = 3 * 2 * (9 + 2) + 1  # types * directions * (tuned shapes + general), and row copies
ROOT = Path(__file__).resolve().parents[3]
SKIPPED = 77


def find_nvcc() -> tuple[str, list[str]] | None:
    """Return nvcc and the include folders it needs, or None."""
    on_path = shutil.which("nvcc")
    if on_path:
        return on_path, []
    for place in dict.fromkeys([sysconfig.get_path("purelib"), *site.getsitepackages(), *sys.path]):
        for nvcc in sorted(Path(place or ".").glob("nvidia/*/bin/nvcc")):
            home = nvcc.parent.parent
            if (home / "include/cuda_runtime.h").is_file():
                return str(nvcc), [str(home / "include"), str(home / "include/cccl")]
    return None


def compile_for(nvcc: str, includes: list[str], architecture: int, folder: str) -> str:
    """Return what ptxas says about the kernels."""
    command = [nvcc, "-std=c++17", "-O3", f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v"]
    command += ["-o", f"{folder}/{architecture}.cubin", f"-I{ROOT / 'cpp/include'}"]
    command += [f"-I{include}" for include in includes]
    command.append(str(ROOT / "cpp/src/checkpoint_copy_cuda.cu"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"sm_{architecture}: nvcc failed\n{done.stderr}")
    return done.stderr


def check(log: str) -> tuple[int, int, list[str]]:
    """Return kernels seen, most registers used, and a line for each kernel that uses memory."""
    pattern = re.compile(
        r"Function properties for (\S+)\s+(\d+) bytes stack frame, (\d+) bytes spill stores,"
        r" (\d+) bytes spill loads"
    )
    seen = pattern.findall(log)
    bad = [
        f"{name}: {frame} bytes of stack frame, {stores} stored and {loads} loaded as spills"
        for name, frame, stores, loads in seen
        if any(int(n) for n in (frame, stores, loads))
    ]
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0)
    return len(seen), registers, bad


def main() -> int:
    """Check all architectures; return the exit code."""
    found = find_nvcc()
    if found is None:
        reason = "no nvcc on the PATH and no nvidia-cuda-nvcc wheel: kernels not compiled"
        sys.stdout.write(f"skipped: {reason}\n")
        return 1 if os.environ.get("CI") == "true" else SKIPPED
    failed = False
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        logs = pool.map(
            lambda architecture: compile_for(*found, architecture, folder), ARCHITECTURES
        )
        for architecture, log in zip(ARCHITECTURES, logs, strict=True):
            seen, registers, bad = check(log)
            sys.stdout.write(
                f"sm_{architecture}: {seen} kernels, {registers} registers at most,"
                f" {len(bad)} with spills or a stack frame\n"
            )
            sys.stdout.writelines(f"  {line}\n" for line in bad)
            if seen != KERNELS:
                sys.stdout.write(f"  expected {KERNELS} kernels\n")
            failed = failed or bool(bad) or seen != KERNELS
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
