"""`statecache doctor` beside a small engine: its seams, its settings, and a running server."""

import json
import logging
from pathlib import Path

import pytest

from statecache.engine.seams import Seam, check
from statecache.errors import SeamError
from support.doctored import ACTIVE, WITHOUT_ENGINE, doctor, findings, planted, server

ENGINE = """
Seam(MODULE, "Pool.touch", ("self", "blocks")),
Seam(MODULE, "Pool.gone"),
Seam("vllm.nowhere", "x"),
Seam("vllm.broken", "x"),
Seam(MODULE, "Pool.free", ("self", "blocks")),
"""


SPEC = """
from statecache.engine.spec import EngineSpec
from statecache_{name}.seam_table import SEAMS, TESTED


def version():
    from statecache_{name}.seams import engine_version

    return engine_version()


SPEC = EngineSpec(
    name="{name}",
    title="{title}",
    plugin_group="{group}",
    disable_variable="{variable}",
    tested_versions=TESTED,
    seams=SEAMS,
    version=version,
    extensions={extensions},
)
"""


VLLM = {
    "name": "vllm",
    "title": "vLLM",
    "group": "vllm.general_plugins",
    "variable": "VLLM_PLUGINS",
    "extensions": {"blocks": "the native queue of vLLM's blocks"},
}


SGLANG = {
    "name": "sglang",
    "title": "SGLang",
    "group": "sglang.srt.plugins",
    "variable": "SGLANG_PLUGINS",
    "extensions": {},
}


def with_engine(folder: Path, version: str = "0.32.0", seams: str = ENGINE) -> Path:
    """An engine of one class, and an adapter's table of what it needs of it."""
    engine, adapter = folder / "vllm", folder / "statecache_vllm"
    engine.mkdir()
    (engine / "__init__.py").write_text("print('noise of an engine')\n")
    (engine / "broken.py").write_text("import nothing_like_this\n")
    methods = "def touch(self, blocks): ...\n    def free(self, block): ..."
    (engine / "pool.py").write_text(f"class Pool:\n    {methods}\n")
    adapter.mkdir()
    (adapter / "__init__.py").write_text("def register(): ...\n")
    (adapter / "seams.py").write_text(f"def engine_version(): return {version!r}\n")
    table = "from statecache.engine.seams import Seam\nMODULE = 'vllm.pool'\nTESTED = ('0.32.0',)\n"
    (adapter / "seam_table.py").write_text(f"{table}SEAMS = ({seams})\n")
    (adapter / "spec.py").write_text(SPEC.format(**VLLM))
    return folder


def test_each_seam_that_moved_or_is_missing_is_named(tmp_path: Path) -> None:
    done = doctor("--engine", "vllm", "--seams", path=with_engine(tmp_path))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "PROBLEM vllm        missing: vllm.pool.Pool.gone, vllm.nowhere.x" in lines
    broken = "missing (No module named 'nothing_like_this')"
    assert f"PROBLEM vllm        {broken}: vllm.broken.x" in lines
    assert "PROBLEM vllm        moved (takes self, block): vllm.pool.Pool.free" in lines
    text = "vLLM 0.32.0: 1 of 5 seams are in place; a tested version"
    assert f"note    vllm        {text}" in lines
    assert "  vllm vllm.pool.Pool.touch: ok" in lines
    assert lines[-1] == "It would not work: 3 above."


FORMS = """
Seam(MODULE, "Pool.touch", ("self", "blocks"), (("self", "blocks", "limit"),)),
Seam(MODULE, "Pool.free", ("self", "blocks"), (("self", "block"),)),
Seam(MODULE, "Pool", fields=("free", "evict")),
Seam(MODULE, "Pool.touch", items=2),
Seam(MODULE, "Pool.trace", optional="recording"),
"""


def test_a_form_that_is_gone_is_named_and_what_is_only_off_is_no_problem(tmp_path: Path) -> None:
    done = doctor("--engine", "vllm", "--seams", path=with_engine(tmp_path, seams=FORMS))
    lines = done.stdout.splitlines()
    assert "PROBLEM vllm        moved (has no evict): vllm.pool.Pool" in lines
    items = "moved (has an unknown number of items): vllm.pool.Pool.touch"
    assert f"PROBLEM vllm        {items}" in lines
    assert "  vllm vllm.pool.Pool.free: ok" in lines
    off = "vLLM 0.32.0 works without recording: vllm.pool.Pool.trace: missing"
    assert f"note    vllm        {off}" in lines
    assert lines[-1] == "It would not work: 2 above."


def test_what_stops_a_server_names_a_reason_once_and_three_of_its_seams() -> None:
    seams = [Seam("textwrap", name) for name in "abcde"]
    seams.append(Seam("textwrap", "dedent", ("words",)))
    with pytest.raises(SeamError) as caught:
        checked(seams)
    assert str(caught.value) == (
        "X 2.0 does not fit (tested: 1.9, 1.10: pip install 'x==1.10'): of 6 seams 6 are not in"
        " place: textwrap.a, textwrap.b, textwrap.c and 2 more"
        " (statecache doctor --engine x --seams): missing; textwrap.dedent: moved (takes text)"
    )


def checked(seams: list[Seam]) -> None:
    log = logging.getLogger("statecache.test")
    check("X", "2.0", seams, ["1.9", "1.10"], package="x", strict=False, log=log)


def test_seams_that_moved_each_in_its_own_way_are_named_together() -> None:
    seams = [Seam("textwrap", name, ("words",)) for name in ("dedent", "indent")]
    with pytest.raises(SeamError) as caught:
        checked([*seams, Seam("textwrap", "fill")])
    assert str(caught.value).endswith(
        "of 3 seams 2 are not in place: textwrap.dedent, textwrap.indent: moved"
    )
    with pytest.raises(SeamError) as caught:
        checked(seams[:1])
    assert str(caught.value).endswith(
        "of 1 seams 1 is not in place: textwrap.dedent: moved (takes text)"
    )


def test_it_ends_with_the_version_to_install(tmp_path: Path) -> None:
    """Not where the version is a tested one: then something else is wrong with it."""
    done = doctor("--engine", "vllm", path=with_engine(tmp_path, "0.33.1"))
    cure = "A tested version: pip install 'vllm==0.32.0'\n"
    assert done.stdout.endswith(f"It would not work: 3 above. {cure}")


@pytest.fixture
def one_of_two_broken(tmp_path: Path) -> Path:
    """A vLLM whose seams are in place, an SGLang without a module that it needs itself."""
    with_engine(tmp_path, seams="Seam(MODULE, 'Pool.touch'),")
    engine, adapter = tmp_path / "sglang", tmp_path / "statecache_sglang"
    engine.mkdir()
    (engine / "__init__.py").write_text("")
    (engine / "cache.py").write_text("import vision\n")
    adapter.mkdir()
    (adapter / "__init__.py").write_text("def register(): ...\n")
    (adapter / "seams.py").write_text("def engine_version(): return '0.5.23'\n")
    table = "from statecache.engine.seams import Seam\nTESTED = ('0.5.23',)\n"
    seams = "[Seam('sglang.cache', name) for name in 'abcd']"
    (adapter / "seam_table.py").write_text(f"{table}SEAMS = {seams}\n")
    (adapter / "spec.py").write_text(SPEC.format(**SGLANG))
    return tmp_path


def test_the_engine_that_would_work_is_named_beside_one_that_would_not(
    one_of_two_broken: Path,
) -> None:
    done = doctor(path=one_of_two_broken)
    assert done.returncode == 1
    seams = "sglang.cache.a, sglang.cache.b, sglang.cache.c and 1 more (--seams)"
    text = f"missing (No module named 'vision'): {seams}"
    assert f"PROBLEM sglang      {text}\n" in done.stdout
    alone = "--engine vllm looks at vLLM alone"
    assert done.stdout.endswith(f"It would not work in SGLang: 1 above ({alone}).\n")
    assert doctor("--engine", "vllm", path=one_of_two_broken).returncode == 0


@pytest.mark.parametrize(("engine", "code"), [("vllm", 0), ("sglang", 1)])
def test_beside_a_running_server_only_its_engine_counts(
    engine: str, code: int, one_of_two_broken: Path
) -> None:
    with server(200, f'statecache_active{{engine="{engine}",policy="gds"}} 1.0\n') as url:
        done = doctor("--url", url, "--json", "-", path=one_of_two_broken)
        assert done.returncode == code
        assert set(json.loads(done.stdout)["engines"]) == {engine}
        assert findings(done)["server"][0] == "ok"


@WITHOUT_ENGINE
def test_the_engine_of_a_server_elsewhere_is_not_looked_at_here(tmp_path: Path) -> None:
    path = with_engine(tmp_path)  # a vLLM that would not work
    with server(200, f"{ACTIVE}1.0\n") as url:
        done = doctor("--url", url, path=path)
    assert "note    engines     no SGLang in " in done.stdout
    assert done.returncode == 0


def test_seams_in_place_on_an_untested_version_are_a_note_and_strict_a_problem(
    tmp_path: Path,
) -> None:
    path = with_engine(tmp_path, "0.33.1", "Seam(MODULE, 'Pool.touch', ('self', 'blocks')),")
    text = "vLLM 0.33.1: no difference was found in 1 seams; not a tested version (tested: 0.32.0)"
    done = doctor("--engine", "vllm", "--json", "-", path=path)
    assert done.returncode == 0
    assert findings(done)["vllm"] == ("note", text)
    verdict = "It should work; vLLM 0.33.1 was not tested.\n"
    assert doctor("--engine", "vllm", path=path).stdout.endswith(verdict)
    strict = doctor("--engine", "vllm", "--json", "-", path=path, STATECACHE_STRICT="1")
    assert strict.returncode == 1
    assert findings(strict)["vllm"] == ("problem", text)


@pytest.mark.parametrize("content", [b"no library", None])
def test_the_queue_of_blocks_is_looked_at_where_vllm_is(
    content: bytes | None, tmp_path: Path
) -> None:
    path = with_engine(tmp_path, seams="Seam(MODULE, 'Pool.touch'),")
    assert findings(doctor("--json", "-", path=path))["blocks"][0] == "ok"
    done = doctor("--engine", "vllm", "--json", "-", path=planted(path, "_blocks", content))
    level, text = findings(done)["blocks"]
    assert (level, done.returncode) == ("problem", 1)
    assert text.startswith("the native queue of vLLM's blocks does not load: ImportError: ")
    assert text.endswith(": reinstall statecache with pip in this Python")
    assert "blocks" not in findings(doctor("--engine", "sglang", "--json", "-", path=path))


def test_the_queue_of_blocks_is_vllms_alone(one_of_two_broken: Path) -> None:
    """With it broken SGLang would work, which is in order here."""
    (one_of_two_broken / "sglang" / "cache.py").write_text("a = b = c = d = 1\n")
    done = doctor(path=planted(one_of_two_broken, "_blocks", None))
    alone = "--engine sglang looks at SGLang alone"
    assert done.stdout.endswith(f"It would not work in vLLM: 1 above ({alone}).\n")


def test_an_adapter_that_cannot_look_says_why(tmp_path: Path) -> None:
    path = with_engine(tmp_path)
    (path / "statecache_vllm" / "seams.py").write_text("raise RuntimeError('no such device')\n")
    done = doctor("--engine", "vllm", "--json", "-", path=path)
    text = "the seams of vLLM cannot be looked at: RuntimeError: no such device"
    assert findings(done)["vllm"] == ("problem", text)


def test_a_list_of_plugins_without_ours_is_a_problem(tmp_path: Path) -> None:
    path = with_engine(tmp_path, seams="Seam(MODULE, 'Pool.touch'),")
    done = doctor("--engine", "vllm", path=path, VLLM_PLUGINS="other")
    assert "PROBLEM vllm        VLLM_PLUGINS=other keeps vLLM from loading it" in done.stdout
    assert done.returncode == 1
    assert doctor("--engine", "vllm", path=path, VLLM_PLUGINS="a,statecache").returncode == 0


def test_a_setting_of_the_environment_that_stops_a_server_is_a_problem(tmp_path: Path) -> None:
    path = with_engine(tmp_path, seams="Seam(MODULE, 'Pool.touch'),")
    config = '{"kv_cache_plugin":"statecache","policy":"best"}'
    done = doctor("--engine", "vllm", "--json", "-", path=path, STATECACHE_CONFIG=config)
    level, text = findings(done)["settings"]
    assert (level, done.returncode) == ("problem", 1)
    assert text.startswith("--statecache-policy cannot be 'best': ")
