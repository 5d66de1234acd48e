"""How much memory a pool may take on a device."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["PoolDoesNotFitError", "free_bytes_on", "free_in_groups"]


class PoolDoesNotFitError(ValueError):
    """More slots were asked for than fit in the memory that is free.

    `slots` were asked for, `needed` and `free` are bytes, `fits` is the most slots that do fit.
    """

    def __init__(self, slots: int, needed: int, free: int, fits: int, device: str) -> None:
        self.slots, self.needed, self.free, self.fits = slots, needed, free, fits
        advice = f"{fits} slots would fit" if fits else "not even one slot fits"
        super().__init__(
            f"{slots} slots need {needed:,} bytes on {device}, {free:,} are free: {advice}"
        )


def free_bytes_on(device: torch.device) -> int | None:
    """Return the bytes free on `device`, or None where that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if device.type == "cpu" and meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min([int(line.split()[1]) * 1024, *free_in_groups()])
    return None


def free_in_groups(root: Path = Path("/sys/fs/cgroup"), own: str | None = None) -> list[int]:
    """Return the bytes left in each control group (version 2) of this process that has a limit."""
    left = []
    try:
        lines = (Path("/proc/self/cgroup").read_text() if own is None else own).splitlines()
        path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        here = root / path
        for group in (here, *(up for up in here.parents if up.is_relative_to(root))):
            if not (group / "memory.max").is_file():
                continue
            limit = (group / "memory.max").read_text().strip()
            if limit == "max":
                continue
            used = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used -= int(stat.get("inactive_file", 0))  # what the kernel gives back at once
            left.append(max(int(limit) - used, 0))
    except OSError:
        pass  # a group that is hidden from us tells no limit
    return left
