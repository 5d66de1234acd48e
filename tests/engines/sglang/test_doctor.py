"""`statecache doctor` beside the installed SGLang, as it is and with one method moved."""

import json
import subprocess
import sys

from server import STANDINS, environment

from statecache_sglang.seam_table import RECORDING_SEAMS, SEAMS, TESTED
from support.moved_seam import plant


def doctor(path=None):
    variables = {**environment(), "PYTHONPATH": f"{path}:{STANDINS}" if path else str(STANDINS)}
    command = [sys.executable, "-P", "-m", "statecache", "doctor", "--engine", "sglang"]
    return subprocess.run(
        [*command, "--json", "-"], capture_output=True, text=True, timeout=600, env=variables
    )


READ = "sglang.srt.managers.schedule_batch.Req.full_untruncated_fill_ids"


def test_it_would_work_here_and_every_seam_and_attribute_is_listed():
    done = doctor()
    report = json.loads(done.stdout)
    assert (report["works"], done.returncode) == (True, 0)
    found = report["engines"]["sglang"]
    assert found["version"] in TESTED == tuple(found["tested"])
    used = {f"{seam.module}.{seam.path}" for seam in (*SEAMS, *RECORDING_SEAMS)}
    assert used | {READ} <= found["seams"].keys()
    assert set(found["seams"].values()) == {"ok"}


def test_a_moved_seam_is_named(tmp_path):
    done = doctor(
        plant(tmp_path, "sglang.srt.managers.schedule_policy", "PrefillAdder", "add_one_req")
    )
    report = json.loads(done.stdout)
    assert (report["works"], done.returncode) == (False, 1)
    seam = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
    assert report["engines"]["sglang"]["seams"][seam] == "moved (takes self, other)"
    problems = [finding["text"] for finding in report["findings"] if finding["level"] == "problem"]
    assert problems == [f"moved (takes self, other): {seam}"]
    looked_at = report["engines"]["sglang"]
    total, version = len(looked_at["seams"]), looked_at["version"]
    assert total > len((*SEAMS, *RECORDING_SEAMS))
    in_place = f"{total - 1} of {total} seams are in place"
    notes = [finding["text"] for finding in report["findings"] if finding["level"] == "note"]
    assert f"SGLang {version}: {in_place}; a tested version" in notes
