"""Lists of slots as a pool is given them: checked, and made of Python's own integers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

import torch
from torch import Tensor

__all__ = ["active_slots_in", "integers", "require_distinct", "vector"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def active_slots_in(
    total: int, active_slots: Sequence[int] | Tensor, slots: Sequence[int] | Tensor
) -> Tensor | list[int]:
    """Return the active slots beside `slots`; a tensor is not looked into.

    `ValueError` for one of another length or kind, and for a slot in a list that is not below
    `total`.
    """
    if isinstance(active_slots, Tensor):
        vector(active_slots, "active slots")
    if len(active_slots) != len(slots):
        raise ValueError(f"{len(active_slots)} active slots for {len(slots)} slots")
    if isinstance(active_slots, Tensor):
        return active_slots
    listed = integers(active_slots)
    for slot in listed:
        if slot >= total:
            raise ValueError(f"active slot {slot} is not below {total}")
    return listed


def vector(slots: Tensor, what: str) -> Tensor:
    """Return slots that are a vector of integers; `ValueError` says what else they are."""
    if slots.dim() != 1 or slots.dtype not in _INTEGERS:
        raise ValueError(f"{what} {tuple(slots.shape)} of {slots.dtype}: need a vector of integers")
    return slots


def integers(slots: Iterable[int]) -> list[int]:
    """Return slots as integers; `TypeError` for what is none."""
    return [index(slot) for slot in slots]


def require_distinct(slots: Sequence[int], verb: str) -> None:
    """Raise `ValueError` for a slot that is named twice; `verb` is what cannot be done to it."""
    seen: set[int] = set()
    for slot in slots:
        if slot in seen:
            raise ValueError(f"cannot {verb} slot {slot} twice")
        seen.add(slot)
