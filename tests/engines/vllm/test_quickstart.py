"""The quickstart of docs/vllm.md, with a tiny model."""

import os
from pathlib import Path

from engine import document
from test_server import PORT, ask, serve

from support.quickstart import commands, flags_of, output_of

# The other engine of this environment needs them on a CPU, and doctor looks at both.
SGLANGS = Path(__file__).parents[1] / "sglang" / "standins"


def test_the_commands_work_as_they_stand(model, tmp_path):
    install, doctor, start, ask_server, metrics = commands("vllm.md")
    assert install == "pip install ."  # as this environment was filled
    variables = {**os.environ, "PYTHONPATH": str(SGLANGS)}
    assert "It would work." in output_of(doctor, **variables)
    address = f"http://127.0.0.1:{PORT}"
    with serve(model, tmp_path / "log", *flags_of(start, "vllm serve MODEL")):
        assert "active" in output_of(ask_server, address, **variables)
        cold, warm = (ask(model, document(1, 276)) for _ in range(2))
        shown = output_of(metrics, address, **variables)
    assert cold[0] == 0 < warm[0]
    assert cold[1] == warm[1]
    assert "int8 checkpoints of" in (tmp_path / "log").read_text()
    assert 'statecache_active{engine="vllm"' in shown
