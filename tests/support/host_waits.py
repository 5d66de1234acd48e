"""Records where the plugin makes the host wait for a device, on a machine that has none.

All tensors of such a machine lie in one memory. So a tensor counts as one of the device unless it
was seen to be made on the host: without a `device`, with `"cpu"` by name, with `pin_memory=True`,
by a copy there, or of such tensors alone. `torch.device` objects name the engine's device.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PACKAGES = ("statecache", "statecache_vllm", "statecache_sglang")

# Each needs a value, or a size, that only the device knows.
_NAMES_OF_READS = """
    item tolist numpy __array__ __bool__ __int__ __float__ __complex__ __index__ __contains__
    __repr__ __format__ is_nonzero equal allclose nonzero argwhere masked_select unique
    unique_consecutive bincount
"""
_READS = frozenset(_NAMES_OF_READS.split())
_UPLOADS = frozenset(["tensor", "as_tensor", "asarray"])
_FACTORIES = _UPLOADS | {"from_numpy", "empty", "zeros", "ones", "full", "arange"}
_WAITING = (
    (torch.cuda, "synchronize"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.cpu, "synchronize"),
    (torch.accelerator, "synchronize"),
)


class Wait(NamedTuple):
    """One call that waits, and the function of the plugin that made it: module and name."""

    call: str
    where: str


class Allowed(NamedTuple):
    """A place that may wait, and why."""

    call: str
    where: str
    reason: str


class StandInEvent:
    """An event of a stream that comes to it when a test says so: `over`."""

    def __init__(self) -> None:
        self.over = False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        _waits_here("Event.synchronize")
        self.over = True


class SlowDevice:
    """Stands in for a device that comes to what a step gave it so many steps later."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._events: deque[list[StandInEvent]] = deque([[] for _ in range(lag)])

    def event_behind(self, _: object) -> StandInEvent:
        """In the place of `statecache.checkpoint.stream_order.event_behind`."""
        made = StandInEvent()
        made.over = self._lag == 0
        if self._events:
            self._events[-1].append(made)
        return made

    def begin_step(self) -> None:
        """A step begins."""
        if self._events:
            for event in self._events.popleft():
                event.over = True
            self._events.append([])


class HostWaits(TorchFunctionMode):
    """Within, `waits` grows by each call of the plugin that makes the host wait for a device.

    A call of the engine is its own, also where the plugin called the engine: what counts is the
    function next to torch. `is_host` tells further tensors that lie on the host. Only the thread
    that entered is seen, except in `synchronize` of the streams, events and devices of CUDA.
    """

    def __init__(
        self,
        allowed: Iterable[Allowed] = (),
        *,
        packages: Sequence[str] = PACKAGES,
        is_host: Callable[[Tensor], bool] = lambda _: False,
    ) -> None:
        super().__init__()
        self.waits: list[Wait] = []
        self._allowed = list(allowed)
        for row in self._allowed:
            assert row.reason.strip(), f"{row.call} in {row.where} is allowed without a reason"
        self._packages = frozenset(packages)
        self._is_host = is_host
        self._on_host: dict[int, weakref.ref[Tensor]] = {}
        self._saved: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> HostWaits:
        super().__enter__()
        _ACTIVE.append(self)
        for owner, name in _WAITING:
            original = getattr(owner, name)
            self._saved.append((owner, name, original))
            title = f"{owner.__name__.rpartition('.')[2]}.{name}"
            setattr(owner, name, _reported(title, original))
        return self

    def __exit__(self, *error: object) -> None:
        while self._saved:
            setattr(*self._saved.pop())
        _ACTIVE.remove(self)
        super().__exit__(*error)

    def unexpected(self) -> list[Wait]:
        """Return the waits that no row allows."""
        allowed = {(row.call, row.where) for row in self._allowed}
        return [wait for wait in self.waits if wait not in allowed]

    def check(self) -> None:
        """Fail for a wait that no row allows, and for a row that allowed none."""
        assert not self.unexpected()
        unused = [row for row in self._allowed if (row.call, row.where) not in self.waits]
        assert not unused, f"nothing waits there any more: {unused}"

    def note(self, call: str, frame: FrameType | None) -> None:
        """A call that waits was made from `frame`, or from torch under it."""
        where = self._ours(frame)
        if where is not None:
            self.waits.append(Wait(call, where))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        name = getattr(func, "__name__", "")
        ours = self._ours(frame)
        if ours is None:
            return func(*args, **kwargs)
        if self._waits(name, args, kwargs):
            self.waits.append(Wait(name, ours))
        result = func(*args, **kwargs)
        made = [each for each in _listed(result) if isinstance(each, Tensor)]
        if made and self._made_on_host(name, args, kwargs):
            self._on_host.update((id(each), weakref.ref(each)) for each in made)
        return result

    def _ours(self, frame: FrameType | None) -> str | None:
        """Return the function next to torch, None where it is not the plugin's."""
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            package = module.partition(".")[0]
            if package in self._packages:
                return f"{module}.{frame.f_code.co_qualname}"
            if package not in ("torch", "numpy") and module != __name__:
                return None
            frame = frame.f_back
        return None

    def _lies_on_host(self, tensor: Tensor) -> bool:
        known = self._on_host.get(id(tensor))
        return (known is not None and known() is tensor) or self._is_host(tensor)

    def _waits(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        given = [each for each in args if isinstance(each, Tensor)]
        on_host = [self._lies_on_host(tensor) for tensor in given]
        if name in _READS or (name == "where" and len(args) + len(kwargs) == 1):
            return not all(on_host)
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None and not all(on_host)
        if name in _UPLOADS:
            device = kwargs.get("device")
            return device is not None and not _names_host(device)
        if name in ("__getitem__", "__setitem__"):
            indexes = args[1] if isinstance(args[1], tuple) else (args[1],)
            return not on_host[0] and any(map(self._index_waits, indexes))
        if name == "copy_":
            source = args[1] if len(args) > 1 else kwargs["src"]
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            return blocking and self._lies_on_host(args[0]) != self._lies_on_host(source)
        if name in ("to", "cpu", "cuda"):
            target = self._target(name, args, kwargs)
            blocking = True not in args[2:] and not kwargs.get("non_blocking", False)
            return target is not None and blocking and on_host[0] != target
        return False

    def _index_waits(self, index: Any) -> bool:
        """Whether an index of a tensor on the device is read from there, or brought there."""
        if isinstance(index, Tensor):
            mask = index.dtype in (torch.bool, torch.uint8)
            return mask or index.dim() == 0 or self._lies_on_host(index)
        return isinstance(index, list)

    def _target(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool | None:
        """Whether a copy goes to the host; None where it goes nowhere."""
        if name != "to":
            return name == "cpu"
        given = kwargs.get("device", kwargs.get("other", args[1] if len(args) > 1 else None))
        if isinstance(given, Tensor):
            return self._lies_on_host(given)
        if isinstance(given, (str, torch.device)):
            return _names_host(given)
        return None

    def _made_on_host(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        if kwargs.get("pin_memory"):
            return True
        if name in ("to", "cpu", "cuda"):
            target = self._target(name, args, kwargs)
            return self._lies_on_host(args[0]) if target is None else target
        of = [each for argument in args for each in _listed(argument) if isinstance(each, Tensor)]
        device = kwargs.get("device")
        if device is not None:
            return _names_host(device)
        if of:
            return all(map(self._lies_on_host, of))
        return name in _FACTORIES


def _names_host(device: object) -> bool:
    return isinstance(device, str) and device == "cpu"


def _listed(argument: Any) -> Sequence[Any]:
    return argument if isinstance(argument, (tuple, list)) else (argument,)


def _reported(title: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        _waits_here(title)
        return original(*args, **kwargs)

    return call


def _waits_here(call: str) -> None:
    for active in _ACTIVE:
        active.note(call, sys._getframe(2))


_ACTIVE: list[HostWaits] = []
