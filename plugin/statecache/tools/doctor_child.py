"""What `statecache doctor` has looked at in processes of their own, which may crash.

`python -m statecache.tools.doctor_child WHAT SECONDS` writes one line of JSON to stdout; whatever a
module that is imported prints goes to stderr. It may use so many seconds of CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import resource
import signal
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import msgspec

__all__ = ["EngineFound", "ExtensionFound", "TorchFound", "main"]

_GRACE_SECONDS = 10  # for what does not come back to Python


class ExtensionFound(msgspec.Struct, frozen=True):
    """A part of the plugin's extension works; where it is."""

    file: str


class TorchFound(msgspec.Struct, frozen=True):
    """Torch, its devices, and the copies of the checkpoint pool; `error` where they do not load.

    `broken` says of each device why the copies with kernels do not work there, "" where they do.
    """

    torch: str
    cuda: str | None
    devices: list[str]
    capabilities: list[str]
    error: str | None = None
    built: bool = True
    cpu_instructions: str = ""
    cuda_architectures: str = ""
    broken: list[str] = []


class EngineFound(msgspec.Struct, frozen=True):
    """An engine: its version, those the adapter was tested with, and the state of each seam."""

    version: str
    tested: list[str]
    seams: dict[str, str]


def _index() -> ExtensionFound:
    from statecache import _index

    index = _index.StateIndex()
    index.insert(1, 100)
    if index.evict(1) != [1]:
        raise RuntimeError("the native index does not evict the one state it holds")
    return ExtensionFound(str(_index.__file__))


def _blocks() -> ExtensionFound:
    from statecache import _blocks

    block = SimpleNamespace(block_id=0, ref_cnt=0, is_null=False)
    queue = _blocks.FifoQueue(_blocks.BlockHashIndex([block]))
    queue.append(block)
    if queue.popleft() is not block:
        raise RuntimeError("the native queue does not hand out the one block it holds")
    return ExtensionFound(str(_blocks.__file__))


def _torch() -> TorchFound:
    torch: Any = importlib.import_module("torch")
    devices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    capabilities = ["{}.{}".format(*torch.cuda.get_device_capability(at)) for at in devices]
    found = TorchFound(
        torch=str(torch.__version__),
        cuda=torch.version.cuda,
        devices=[torch.cuda.get_device_name(at) for at in devices],
        capabilities=capabilities,
    )
    spec = importlib.util.find_spec("statecache._checkpoint_ops")
    try:
        _try_copies(torch, "cpu")
    except (ImportError, RuntimeError) as error:
        return msgspec.structs.replace(found, error=str(error), built=spec is not None)
    ops: Any = importlib.import_module("statecache._checkpoint_ops")
    return msgspec.structs.replace(
        found,
        cpu_instructions=ops.cpu_instructions,
        cuda_architectures=ops.cuda_architectures,
        broken=[_failure(torch, f"cuda:{at}") for at in devices] if ops.with_cuda else [],
    )


def _try_copies(torch: Any, device: str) -> None:
    """Have small states of each format and kernel stored and loaded. Raises `RuntimeError`."""
    copies = importlib.import_module("statecache.checkpoint.ops").native_ops()
    check = importlib.import_module("statecache.checkpoint.selftest").check_copies
    with torch.cuda.device(device) if device != "cpu" else contextlib.nullcontext():
        for dtype in (torch.bfloat16, torch.float32):
            for matrix in ((128, 128), (24, 40)):
                check(copies, torch.device(device), "int8", dtype, matrix)
        check(copies, torch.device(device), "native", torch.bfloat16, (8, 8))


def _failure(torch: Any, device: str) -> str:
    try:
        _try_copies(torch, device)
    except RuntimeError as error:
        return str(error).partition("\n")[0].removeprefix("statecache: ")
    return ""


def _engine(name: str) -> EngineFound:
    from statecache.engine.seams import probe
    from statecache.engine.spec import engine_named

    spec = engine_named(name)
    states = dict(probe(spec.seams, spec.views))
    return EngineFound(spec.version(), list(spec.tested_versions), states)


def main(what: str, seconds: str) -> int:
    """Look at "index", "blocks", "torch" or an engine; a failure is the last line of stderr."""
    _limit_cpu(int(seconds))
    out = os.dup(1)
    os.dup2(2, 1)
    looks = {"index": _index, "blocks": _blocks, "torch": _torch}
    found = looks[what]() if what in looks else _engine(what)
    os.write(out, msgspec.json.encode(found) + b"\n")
    # Not by the interpreter's own end: an engine may leave threads behind.
    sys.stderr.flush()
    os._exit(0)


def _limit_cpu(seconds: int) -> None:
    def stop(_signal: int, _frame: object) -> NoReturn:
        sys.stderr.write(f"\nno answer within {seconds} s of CPU\n")
        sys.stderr.flush()
        os._exit(1)

    allowed = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if allowed == resource.RLIM_INFINITY or allowed > seconds + _GRACE_SECONDS:
        signal.signal(signal.SIGXCPU, stop)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + _GRACE_SECONDS))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
