"""How much memory a process and its children take, by what Linux says."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["MemoryWatch", "tree_bytes"]

_PROCESSES = Path("/proc")
_INTERVAL_SECONDS = 0.5
# Of /proc/PID/stat, behind the name: parent, session, resident pages.
_PARENT, _SESSION, _PAGES = 1, 3, 21


def tree_bytes(pid: int) -> int | None:
    """Return the resident memory of a process, its session and all below it; None if it is gone.

    A page that several of them share counts in each.
    """
    pages: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    waiting = []
    for folder in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError, IndexError, ValueError):
            words = (folder / "stat").read_text().rpartition(")")[2].split()
            one = int(folder.name)
            pages[one] = int(words[_PAGES])
            children.setdefault(int(words[_PARENT]), []).append(one)
            if one == pid or int(words[_SESSION]) == pid:
                waiting.append(one)
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += children.get(one, [])
    return sum(pages[one] for one in seen) * os.sysconf("SC_PAGE_SIZE") or None


class MemoryWatch:
    """Looks at a process tree twice a second, in a thread, from `start` to `stop`."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._most: int | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> int | None:
        """Look for the last time, and return the most there was, in bytes."""
        self._ended.set()
        self._thread.join()
        self._look()
        return self._most

    def _run(self) -> None:
        self._look()
        while not self._ended.wait(_INTERVAL_SECONDS):
            self._look()

    def _look(self) -> None:
        found = tree_bytes(self._pid)
        if found is not None:
            self._most = max(found, self._most or 0)
