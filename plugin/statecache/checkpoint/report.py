"""What became of a store into a checkpoint pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from statecache.checkpoint.stream_order import is_over

__all__ = ["StoreReport"]


class StoreReport:
    """What became of one store.

    Its flags follow the store into pinned memory. Reading them waits for that store, on whatever
    stream it ran, unless it `is_ready`.
    """

    def __init__(
        self,
        flags: Tensor | Sequence[int],
        done: torch.cuda.Event | None,
        settle: Callable[[Sequence[int]], tuple[int, ...]],
    ) -> None:
        self._flags = flags
        self._done = done
        self._settle = settle
        self._refused: tuple[int, ...] | None = None

    @property
    def is_on_host(self) -> bool:
        """Whether there is nothing to wait for, and never was."""
        return self._done is None

    def is_ready(self) -> bool:
        """Whether the report can be read without waiting."""
        return self._refused is not None or is_over(self._done)

    def refused(self) -> tuple[int, ...]:
        """Return the slots that hold no state, so forget them: the pool has freed them.

        Unless it was made to keep them. Their source held NaN or Inf, or could not come back
        finite. A slot that was skipped is not among them: it holds what it held before the store.
        """
        if self._refused is None:
            if self._done is not None and not self.is_ready():
                self._done.synchronize()
            flags = self._flags
            self._refused = self._settle(flags.tolist() if isinstance(flags, Tensor) else flags)
        return self._refused
