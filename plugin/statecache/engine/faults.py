"""Where an error of the plugin stops, and what goes on in its place.

Advice must never take a server down. An adapter makes one `FaultBarrier`; what may fail is
decorated where it is written, so that it keeps its name and can be followed by search:

* `@guarded(hand_over)`: an unexpected error is counted, and `hand_over` answers in place of the
  method, with the same arguments. The part that failed must be switched off by `hand_over` itself.
* `@advisory`: an unexpected error is counted and ends all advice behind the barrier; the method,
  and every other one of this kind, returns None from then on.

A method without its owner (a native one, one of another object) goes through `FaultBarrier.wrap`
or `FaultBarrier.ask`, which do the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar, TypeVarTuple

__all__ = ["FaultBarrier", "Guarded", "MaybeGuarded", "advisory", "guarded"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class FaultBarrier:
    """Counts what must not happen, and logs the first of it.

    `takes_over` says in the log what the engine does from then on, `error` what an unexpected
    error is called there. `active` is False once advice was given up.
    """

    def __init__(
        self, log: logging.Logger, takes_over: str, error: str = "an unexpected error"
    ) -> None:
        self.anomalies = 0
        self.active = True
        self._log = log
        self._takes_over = takes_over
        self._error = error

    def count(self, what: str, *, traceback: bool = False, takes_over: bool = True) -> None:
        """Count something that must not happen; log the first one.

        `takes_over` is False where the plugin itself goes on.
        """
        self.anomalies += 1
        if self.anomalies == 1:
            ending = f"; {self._takes_over}" if takes_over else ""
            self._log.error("statecache: %s%s", what, ending, exc_info=traceback)

    def failed(self) -> None:
        """Count the exception that is being handled."""
        self.count(self._error, traceback=True)

    def give_up(self, what: str) -> None:
        """Count something that must not happen; the engine decides from now on."""
        self.active = False
        self.count(what)

    def wrap(
        self, call: Callable[[*_Ts], _T], hand_over: Callable[[*_Ts], _T]
    ) -> Callable[[*_Ts], _T]:
        """Return `call` that never raises an `Exception`: then it returns what `hand_over` does.

        Positional arguments only: some of these calls are made for every block.
        """

        def guard(*args: *_Ts) -> _T:
            try:
                return call(*args)
            except Exception:
                self.failed()
            return hand_over(*args)

        return functools.update_wrapper(guard, call, updated=())

    def ask(self, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """Return what `call` returns, None once the engine decides by itself."""
        if not self.active:
            return None
        try:
            return call(*args, **kwargs)
        except Exception:
            self.active = False
            self.failed()
            return None


class Guarded(Protocol):
    """An object with a barrier, whose methods may be `guarded`."""

    faults: FaultBarrier


class MaybeGuarded(Protocol):
    """An object whose methods may be `advisory`; without a barrier they do nothing."""

    @property
    def faults(self) -> FaultBarrier | None:
        """The barrier of this object."""


_Owner = TypeVar("_Owner", bound=Guarded)
_Advised = TypeVar("_Advised", bound=MaybeGuarded)


def guarded(
    hand_over: Callable[..., _T],
) -> Callable[[Callable[[_Owner, *_Ts], _T]], Callable[[_Owner, *_Ts], _T]]:
    """Decorate a method of an object with `faults`: it never raises an `Exception`.

    Then it returns what the function `hand_over` returns for the same object and arguments. Call it
    with positional arguments. What `hand_over` raises is raised.
    """

    def decorate(method: Callable[[_Owner, *_Ts], _T]) -> Callable[[_Owner, *_Ts], _T]:
        @functools.wraps(method)
        def guard(owner: _Owner, *args: *_Ts) -> _T:
            try:
                return method(owner, *args)
            except Exception:
                owner.faults.failed()
            return hand_over(owner, *args)

        return guard

    return decorate


def advisory(
    method: Callable[Concatenate[_Advised, _P], _T],
) -> Callable[Concatenate[_Advised, _P], _T | None]:
    """Decorate a method of an object with `faults`: an error ends the advice behind the barrier.

    Returns None then, and where there is no barrier or advice was given up before.
    """

    @functools.wraps(method)
    def guard(owner: _Advised, *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        faults = owner.faults
        if faults is None or not faults.active:
            return None
        try:
            return method(owner, *args, **kwargs)
        except Exception:
            faults.active = False
            faults.failed()
            return None

    return guard  # type: ignore[return-value]  # functools.wraps names the owner
