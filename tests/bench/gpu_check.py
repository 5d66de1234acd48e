"""Build the checkpoint copies for the GPU at hand, test them, measure them, in about three minutes.

    tests/bench/gpu_check.sh [PYTHON [SITE]]

Needs torch from 2.11 on for CUDA, pytest, nvcc, a C++ compiler and Python's headers; no network, no
pip, no cmake. A step that fails does not end the others: the table at the end says what became of
each, the exit code whether any failed. Logs and table lie in $OUT (build/gpu_check). Without a GPU
every step runs on the CPU, as a rehearsal. SITE is a folder that holds a statecache built already.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(os.environ.get("OUT") or ROOT / "build/gpu_check").resolve()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = """
import sys, torch
from statecache.checkpoint.ops import native_ops
from statecache.checkpoint.selftest import check_copies
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for matrix in ((64, 64), (128, 128), (24, 40), (80, 128)):
        for mode in ("int8", "native"):
            check_copies(native_ops(), torch.device(sys.argv[1]), mode, dtype, matrix)
print("all states come back")
"""
LOADS = "from statecache.checkpoint.ops import native_ops; print(native_ops().name, 'copies load')"


class Step(NamedTuple):
    """A row of the table: its commands one after the other, all of them in so many seconds."""

    name: str
    seconds: int
    commands: list[list[str]]


def run(step: Step, environment: dict[str, str]) -> tuple[str, str]:
    """Return what became of a step, and its last line; its output goes to stdout and a log."""
    sys.stdout.write(f"== {step.name}\n")
    sys.stdout.flush()
    until = time.monotonic() + step.seconds
    output = ""
    result = "ok"
    for command in step.commands:
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=max(until - time.monotonic(), 1),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            output += (error.stdout or b"").decode(errors="replace")
            result = "out of time"
        except OSError as error:
            output += f"{command[0]}: {error.strerror}\n"
            result = "failed"
        else:
            output += done.stdout.decode(errors="replace")
            if done.returncode:
                output += f"exit code {done.returncode}: {shlex.join(command)[:200]}\n"
                result = "failed"
        if result != "ok":
            break
    (OUT / f"{step.name}.log").write_text(output)
    sys.stdout.write(output)
    lines = [line for line in output.splitlines() if line.strip()]
    return result, lines[-1].strip() if lines else ""


def build(site: Path) -> Step:
    """Return how the operators are built, by the compilers alone; copies the Python files."""
    package = site / "statecache"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(ROOT / "plugin/statecache", package)
    about = site / "statecache-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: statecache\nVersion: 0\n")
    folder = Path(torch.__file__).parent
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    # As cpp/checkpoint.cmake: the oldest torch that the build is for.
    target = "0x020d000000000000ULL" if version >= (2, 13) else "0x020b000000000000ULL"
    flags = ["-std=c++20", "-O3", "-fPIC", "-ffp-contract=off", "-Icpp/include"]
    defines = ["-DPy_LIMITED_API=0x030b0000", f"-DTORCH_TARGET_VERSION={target}"]
    includes = [f"-I{folder / 'include'}", f"-I{sysconfig.get_path('include')}"]
    libraries = [f"-L{folder / 'lib'}", "-ltorch_cpu"]
    objects = [str(OUT / "cpu.o"), str(OUT / "ops.o")]
    commands = []
    linker = "c++"
    if DEVICE == "cuda":
        major, minor = torch.cuda.get_device_capability()
        at = f"{major}{minor}"
        defines += ["-DSTATECACHE_WITH_CUDA", f'-DSTATECACHE_CUDA_ARCHITECTURES="{at}-real"']
        libraries.append("-ltorch_cuda")
        objects.append(str(OUT / "cuda.o"))
        linker = "nvcc"
        code = ["-gencode", f"arch=compute_{at},code=sm_{at}"]
        cuda = ["nvcc", "-std=c++17", "-O3", "-Xcompiler", "-fPIC", *code, "-Icpp/include"]
        commands.append([*cuda, "-c", "cpp/src/checkpoint_copy_cuda.cu", "-o", objects[2]])
    source = ["-fno-trapping-math", "-c", "cpp/src/checkpoint_copy_cpu.cpp", "-o", objects[0]]
    commands.append(["c++", *flags, *source])
    source = ["-c", "cpp/bindings/checkpoint_ops.cpp", "-o", objects[1]]
    commands.append(["c++", *flags, *defines, *includes, *source])
    module = str(package / "_checkpoint_ops.abi3.so")
    commands.append([linker, "-shared", *objects, *libraries, "-o", module])
    commands.append([sys.executable, "-c", LOADS])
    return Step("build", 240, commands)


def steps(site: Path | None) -> list[Step]:
    """Return what is done here, in order."""
    python = sys.executable
    built = [] if site is not None else [build(OUT / "site")]
    tests = [python, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    small = [python, "-c", SMALL, DEVICE]
    after = [
        Step("small", 60, [small]),
        Step("tests", 180, [[*tests, "--noconftest", "tests/gpu"]]),
    ]
    speed = [python, "tests/bench/bench_checkpoint.py"]
    if DEVICE == "cpu":
        kernels = [python, "tests/cpp/checkpoint/check_kernels.py"]
        checks = [Step("kernels", 600, [kernels])] if shutil.which("nvcc") and built else []
        speed += ["--dtypes", "bf16", "--slots", "2", "--shape", "2", "4", "64", "64"]
        speed += ["--threads", "1", "--runs", "3"]
        return [*checks, *built, *after, Step("bandwidth", 120, [speed])]
    query = "--query-gpu=name,driver_version,clocks.sm,clocks.mem"
    speed += ["--device", "cuda", "--dtypes", "bf16", "fp32", "--slots", "1", "8", "64"]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", "--tool"]
    return [
        Step("device", 20, [["nvidia-smi", query, "--format=csv,noheader"]]),
        *built,
        *after,
        Step("bandwidth", 150, [speed]),
        *(Step(tool, 60, [[*sanitizer, tool, *small]]) for tool in ("memcheck", "racecheck")),
    ]


def main() -> int:
    """Run all steps; return the exit code."""
    OUT.mkdir(parents=True, exist_ok=True)
    site = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else None
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "no GPU here: a rehearsal"
    title = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {where}"
    sys.stdout.write(f"{title}\n")
    paths = [str(site or OUT / "site"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    rows = []
    failed = False
    for step in steps(site):
        begin = time.monotonic()
        result, last = run(step, environment)
        took = time.monotonic() - begin
        failed = failed or result != "ok"
        rows.append(f"{step.name:10} {result:11} {took:5.0f} s  {last[:120]}")
    table = "\n".join([title, *rows]) + "\n"
    (OUT / "table.txt").write_text(table)
    sys.stdout.write(f"== what became of it\n{table}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
