"""Sizes of memory, as people write them."""

from __future__ import annotations

import re

__all__ = ["bytes_in"]

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?([KMGT]?i?B?)", re.I | re.A)


def bytes_in(text: str) -> int | None:
    """Return the bytes that a text as `60GiB` or `1.5 TB` names, None if it names none.

    Without a unit it is a number of bytes.
    """
    found = _SIZE.fullmatch(text.strip())
    unit = found and found[2].upper()
    if found is None or unit is None or unit not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[unit]) or None
