"""Prints what the tests need, from pyproject.toml: base dependencies, extras plot, ab and dev.

Where there is no CUDA compiler on the PATH its wheels are added, so that the kernels are compiled
on every machine. The five belong together: pip would take later ones of some.
"""

import shutil
import sys
import tomllib
from pathlib import Path

NVCC = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
]

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
needed = [*project["dependencies"], *extras["plot"], *extras["ab"], *extras["dev"]]
if shutil.which("nvcc") is None:
    needed += NVCC
sys.stdout.write("\n".join(needed) + "\n")
