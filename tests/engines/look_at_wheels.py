"""What the doctor says of published wheels that are not installed, as rows of a table.

usage: tests/engines/look_at_wheels.py REQUIREMENT ...    # sglang vllm==0.33.0: the newest, or this

Exit status 1 if a seam of one of them is not in place, 2 if one cannot be had.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from statecache.engine.seams import features_off, is_broken


def look(requirement: str) -> tuple[str, bool]:
    """Return the row of one wheel, and whether the plugin would start with it."""
    with tempfile.TemporaryDirectory() as folder:
        download = ["pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder]
        subprocess.run([sys.executable, "-m", *download, requirement], check=True)
        (wheel,) = Path(folder).iterdir()
        doctor = ["statecache", "doctor", "--engine-source", str(wheel), "--json", "-"]
        done = subprocess.run([sys.executable, "-m", *doctor], capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr.decode())
    ((name, found),) = json.loads(done.stdout)["engines"].items()
    states = list(found["seams"].items())
    broken = [f"`{seam}` {state}" for seam, state in states if is_broken(state)]
    off = [f"without {feature}" for feature in features_off(states)]
    in_place = sum(state == "ok" for _, state in states)
    said = "; ".join(broken or off) or "no difference"
    return f"| {name} {found['version']} | {in_place} of {len(states)} | {said} |", not broken


def main() -> int:
    """Print a table; return the exit status."""
    print("| wheel | seams in place | what is different |\n|---|---|---|")
    fits = True
    for requirement in sys.argv[1:]:
        try:
            row, starts = look(requirement)
        except subprocess.CalledProcessError:
            return 2
        fits &= starts
        print(row, flush=True)
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
