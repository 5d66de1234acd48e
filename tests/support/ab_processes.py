"""Which processes that a test started are still there."""

from pathlib import Path


def gone(pids: Path) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split())
