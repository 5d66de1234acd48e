"""The check of a GPU, rehearsed on the CPU: a step that fails does not end the others."""

import os
import subprocess
import sys
from pathlib import Path

CHECK = Path(__file__).parents[2] / "bench/gpu_check.sh"


def test_the_steps_go_on_past_one_that_fails(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    # In the place of pytest: the copies are those that are installed.
    (site / "pytest.py").write_text("print('planted')\nraise SystemExit(3)\n")
    out = tmp_path / "out"
    done = subprocess.run(
        [CHECK, sys.executable, site],
        env={**os.environ, "OUT": str(out), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    title, *rows = (out / "table.txt").read_text().splitlines()
    assert title.startswith("torch 2.")
    assert title.endswith("no GPU here: a rehearsal")
    assert [row.split()[:2] for row in rows] == [
        ["small", "ok"],
        ["tests", "failed"],
        ["bandwidth", "ok"],
    ]
    assert rows[0].endswith("all states come back")
    assert "exit code 3" in rows[1]
    assert "planted" in (out / "tests.log").read_text()
    assert done.stdout.endswith("\n".join([title, *rows]) + "\n")
    assert (done.returncode, done.stderr) == (1, "")
