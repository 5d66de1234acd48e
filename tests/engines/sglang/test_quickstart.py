"""The quickstart of docs/sglang.md, with a tiny model."""

from server import SERVE, environment, running
from tiny_model import make_tiny_model

from support.quickstart import commands, flags_of, output_of


def test_the_commands_work_as_they_stand(tmp_path):
    install, doctor, start, ask_server, metrics = commands("sglang.md")
    assert install == "pip install ."  # as this environment was filled
    variables = environment()
    assert "It would work." in output_of(doctor, **variables)
    model, log = make_tiny_model(tmp_path / "model"), tmp_path / "log"
    with running(model, log, *flags_of(start, "sglang serve MODEL"), start=SERVE) as server:
        address = f"http://127.0.0.1:{server.port}"
        assert "active" in output_of(ask_server, address, **variables)
        prompt = list(range(4, 204))
        first = server.generate(prompt)
        second = server.generate([*prompt, *first["tokens"], *range(4, 24)])
        shown = output_of(metrics, address, **variables)
    assert first["cached"] == 0 < second["cached"]
    assert "statecache: int8 checkpoint pool of" in log.read_text(errors="replace")
    assert 'statecache_active{engine="sglang"' in shown
