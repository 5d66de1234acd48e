"""`statecache doctor` beside the installed vLLM, as it is and with one method moved."""

import json
import os
import subprocess
import sys

from statecache.engine.seams import probe
from statecache_vllm.seam_table import SEAMS, TESTED, VIEWS
from support.moved_seam import plant


def doctor(path=None):
    variables = {
        **{k: v for k, v in os.environ.items() if not k.startswith("STATECACHE_")},
        "PYTHONPATH": str(path or ""),
    }
    command = [sys.executable, "-P", "-m", "statecache", "doctor", "--engine", "vllm"]
    return subprocess.run(
        [*command, "--json", "-"], capture_output=True, text=True, timeout=600, env=variables
    )


def test_it_would_work_here_and_every_seam_is_listed():
    done = doctor()
    report = json.loads(done.stdout)
    assert (report["works"], done.returncode) == (True, 0)
    found = report["engines"]["vllm"]
    assert found["version"] in TESTED == tuple(found["tested"])
    assert found["seams"].items() >= {f"{seam.module}.{seam.path}": "ok" for seam in SEAMS}.items()
    assert found["seams"]["vllm.v1.core.block_pool.BlockPool.null_block"] == "ok"
    assert set(found["seams"].values()) == {"ok"}


def test_a_moved_seam_is_named(tmp_path):
    done = doctor(plant(tmp_path, "vllm.v1.core.block_pool", "BlockPool", "touch"))
    report = json.loads(done.stdout)
    assert (report["works"], done.returncode) == (False, 1)
    seam = "vllm.v1.core.block_pool.BlockPool.touch"
    assert report["engines"]["vllm"]["seams"][seam] == "moved (takes self, other)"
    problems = [finding["text"] for finding in report["findings"] if finding["level"] == "problem"]
    assert problems == [f"moved (takes self, other): {seam}"]
    total, version = len(probe(SEAMS, VIEWS)), report["engines"]["vllm"]["version"]
    in_place = f"{total - 1} of {total} seams are in place"
    notes = [finding["text"] for finding in report["findings"] if finding["level"] == "note"]
    assert f"vLLM {version}: {in_place}; a tested version" in notes
