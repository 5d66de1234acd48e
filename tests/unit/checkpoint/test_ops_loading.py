"""Which copies a device gets, and what is said where the native ones are not there."""

import subprocess
import sys

import pytest
import torch

from statecache.checkpoint import ops as checkpoint_ops
from statecache.checkpoint.ops import ops_for, plain_ops


def test_the_package_imports_without_torch():
    code = "import sys; import statecache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_the_native_copies_the_loader_says_why_and_uses_plain_torch():
    code = """
import logging, sys
sys.modules["statecache._checkpoint_ops"] = None
logging.basicConfig(format="%(levelname)s %(message)s")
from statecache.checkpoint.ops import ops_for, native_ops
print(ops_for("cpu").name, ops_for("cpu").name)
try:
    native_ops()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("torch torch\nstatecache was installed without its checkpoint")
    assert done.stderr.count("WARNING") == 1
    assert "or STATECACHE_OPS=OFF was set" in done.stderr
    again = "pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation statecache"
    assert again in done.stderr


def test_native_copies_that_do_not_load_are_told_apart():
    code = """
import sys
from importlib.machinery import ModuleSpec

class Broken:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "statecache._checkpoint_ops" else None
    def create_module(self, spec):
        raise ImportError("libtorch_cpu.so: undefined symbol: x")
    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Broken())
from statecache.checkpoint.ops import native_ops
try:
    native_ops()
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "are installed but do not load (libtorch_cpu.so: undefined symbol: x)" in done.stdout
    assert f"this is {torch.__version__}" in done.stdout
    assert "--no-build-isolation" in done.stdout
    assert "STATECACHE_TORCH_DIR" in done.stdout


@pytest.mark.parametrize(
    ("capability", "native"), [((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_gpus_that_are_too_old_use_plain_torch(capability, native, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_ops, "_operators", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    copies = ops_for.__wrapped__("cuda:1")
    assert copies.name == ("native" if native else "torch")
    assert ("need compute capability 8.0, not (7, 5)" in caplog.text) != native


def test_a_device_without_a_kernel_uses_plain_torch(caplog):
    assert ops_for("xpu") is plain_ops()
    assert "without checkpoint kernels for xpu" in caplog.text
