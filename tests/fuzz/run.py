"""Fuzz one target for long, guided by coverage: run.py TARGET SECONDS CORPUS. Needs atheris."""

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["statecache", "targets", "argparse"]):
    import targets

if __name__ == "__main__":
    target, seconds, corpus = sys.argv[1:]
    new = Path("build/fuzz") / target
    new.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", "-max_len=2000", f"-artifact_prefix={new}/finding-"]
    atheris.Setup([sys.argv[0], *options, str(new), corpus], targets.TARGETS[target])
    atheris.Fuzz()
