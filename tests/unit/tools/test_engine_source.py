"""`statecache doctor --engine-source`: what it says of a source is what an import shows."""

import importlib
import itertools
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from statecache.cli import doctor as command
from statecache.engine import spec
from statecache.engine.seams import Seam, methods, probe
from statecache.engine.spec import EngineSpec
from statecache.engine.views import View
from statecache.tools.engine_source import probe_source
from statecache.tools.source_tree import SourceTree
from support.engine_in_source import FILES, table

numbers = itertools.count()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Write the package, some lines of it changed, under a name that was not imported yet."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(*changes: tuple[str, str]) -> str:
        name = f"an_engine_in_source_{next(numbers)}"
        (tmp_path / name).mkdir()
        for file, text in FILES.items():
            for old, new in changes:
                text = text.replace(old, new)
            (tmp_path / name / file).write_text(text)
        importlib.invalidate_caches()
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("an_engine_in_source")]:
        del sys.modules[name]


PLANTED = {
    "nothing": (),
    "renamed method": (
        ("def touch(self", "def touch_all(self"),
        ("release = touch", "def release(self): ..."),
    ),
    "renamed method of a base": (("def free(", "def give_back("),),
    "added argument": (("def touch(self, blocks)", "def touch(self, blocks, more=0, less=1)"),),
    "the other signature": (("def touch(self, blocks)", "def touch(self, blocks, more=0)"),),
    "argument by keyword": (("def touch(self, blocks)", "def touch(self, *, blocks)"),),
    "field gone": (("    token: int\n", ""),),
    "field of a dataclass gone": (("    last: int = 0\n", ""),),
    "field listed nowhere": (("    shared: int\n", ""),),
    "attribute assigned no more": (("self.blocks, self.rest = blocks, rest", "self.rest = rest"),),
    "property gone": (("    @property\n    def size", "    def sizes"),),
    "shorter tuple": (("    parent: int\n", ""),),
    "shorter result": (("tuple[list[int], int]", "tuple[list[int]]"),),
    "longer attribute": (("tuple[int, str, None]", "tuple[int, str, None, int]"),),
    "another base": (
        ("class Pool(Base)", "class Pool(Kindless)"),
        ("class Base", "class Kindless"),
    ),
    "more in a class": (("    KIND = ", "    MORE = 1\n    KIND = "),),
    "other names in the code": (("self.queue.remove(blocks)", "self.queue.drop(blocks, Kind)"),),
    "a member of an enum": (("    FULL = 1\n", ""),),
    "no longer exported": (("from .pool import Pool as Exported\n", ""),),
    "slot gone": (('("slot",)', '("other",)'),),
}


# Signatures are compared by the names in them.
UNSEEN = ("nothing", "the other signature", "argument by keyword")


@pytest.mark.parametrize("planted", PLANTED)
def test_the_verdict_is_that_of_what_is_imported(planted: str, package: Any, tmp_path: Path):
    changes = PLANTED[planted]
    if planted == "another base":
        changes = (*changes, ("import Base", "import Kindless"))
    name = package(*changes)
    seams, views = table(name)
    written = probe_source(SourceTree(tmp_path), seams, views)
    assert written == probe(seams, views)


def test_each_planted_change_is_found(package: Any, tmp_path: Path):
    plain = package()
    seams, views = table(plain)
    states = [
        re.sub(r"source_\d+", "source", state)
        for _, state in probe_source(SourceTree(tmp_path), seams, views)
    ]
    for planted, changes in PLANTED.items():
        if planted == "another base":
            changes = (*changes, ("import Base", "import Kindless"))
        found = [
            state for _, state in probe_source(SourceTree(tmp_path), *table(package(*changes)))
        ]
        found = [re.sub(r"source_\d+", "source", state) for state in found]
        assert (found == states) == (planted in UNSEEN), planted


def test_a_class_that_a_call_makes_anew_has_what_its_module_imports(tmp_path: Path):
    """As `defstruct` does with the fields of several classes; what it lists itself counts, too."""
    (tmp_path / "made").mkdir()
    for file, text in {
        "__init__.py": "",
        "fields.py": "class Memory:\n    size: int\n",
        "args.py": (
            "from made.fields import Memory\n"
            "class Args:\n    def run(self): ...\n"
            "Args.__annotations__ = {}\n"
            "Args = make('Args', Args.__annotations__)\n"
        ),
    }.items():
        (tmp_path / "made" / file).write_text(text)

    class ArgsView(Protocol):
        size: int
        gone: int

    seams = methods("made.args", "Args", {"run": "", "stop": ""})
    assert probe_source(SourceTree(tmp_path), seams, [View(ArgsView, "made.args:Args")]) == [
        ("made.args.Args.run", "ok"),
        ("made.args.Args.stop", "missing"),
        ("made.args.Args.size", "ok"),
        ("made.args.Args.gone", "missing"),
    ]


def test_what_cannot_be_read_is_missing_with_the_reason(tmp_path: Path):
    (tmp_path / "odd").mkdir()
    for file, text in {
        "__init__.py": "",
        "future.py": "def broken(:\n",
        "circle.py": "from odd.circle import a\nb = c\nc = b\nclass A(A2): ...\nclass A2(A): ...\n",
        "native.cpython-311.so": "\0Binding\0call_it\0",
    }.items():
        (tmp_path / "odd" / file).write_text(text)
    tree = SourceTree(tmp_path)
    native = [Seam("odd.native", "Binding.call_it"), Seam("odd.native", "Binding.gone")]
    assert [state for _, state in probe_source(tree, native)] == ["ok", "missing"]
    ((_, state),) = probe_source(tree, [Seam("odd.future", "broken")])
    assert state.startswith("missing (invalid syntax")
    ((_, state),) = probe_source(tree, [Seam("odd.circle", "A.x")])
    assert state.startswith("missing (")
    assert dict(probe_source(tree, [Seam("odd.circle", "b")])) == {"odd.circle.b": "ok"}


@pytest.fixture
def toy(package: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have the package be the one engine there is."""
    name = package()
    seams = [Seam(f"{name}.pool", "Pool.touch", ("self", "blocks"))]
    seams.append(Seam(f"{name}.pool", "Pool.gone", optional="the gone thing"))
    made = EngineSpec(name, "Toy", "toy.plugins", ("1.0", "1.1"), seams, lambda: "1.0")
    monkeypatch.setattr(spec, "engines", lambda: {name: made})
    for place in ("statecache.tools.engine_source", "statecache.cli.doctor"):
        monkeypatch.setattr(f"{place}.engines", lambda: {name: made})
    return name


def ask(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object):
    monkeypatch.setattr(sys, "argv", ["statecache", "doctor", *map(str, words)])
    try:
        code = command.main()
    except SystemExit as stop:
        code = int(str(stop.code))
    done = capsys.readouterr()
    return code, done.out.splitlines(), done.err


def wheel_of(folder: Path, name: str, version: str, wheel: Path) -> Path:
    with zipfile.ZipFile(wheel, "w") as file:
        for part in (folder / name).iterdir():
            file.write(part, f"{name}/{part.name}")
        info = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        file.writestr(f"{name}-{version}.dist-info/METADATA", info)
    return wheel


def test_a_folder_a_checkout_the_package_and_a_wheel_say_the_same(
    toy: str, tmp_path: Path, capsys, monkeypatch
):
    wheel = wheel_of(tmp_path, toy, "1.1+cpu", tmp_path / "toy.whl")
    checkout = tmp_path / "checkout"
    (checkout / "python").mkdir(parents=True)
    (checkout / "python" / toy).symlink_to(tmp_path / toy)
    off = f"works without the gone thing: {toy}.pool.Pool.gone: missing"
    for place, version, said in (
        (tmp_path, "unknown", "; not a tested version (tested: 1.0, 1.1)"),
        (tmp_path / toy, "unknown", "; not a tested version (tested: 1.0, 1.1)"),
        (checkout, "unknown", "; not a tested version (tested: 1.0, 1.1)"),
        (wheel, "1.1", "; a tested version"),
    ):
        code, lines, errors = ask(capsys, monkeypatch, "--engine-source", place)
        assert (code, errors) == (0, "")
        assert f"Toy {version} {off}" in lines[1]
        assert lines[2].endswith(f"Toy {version}: 1 of 2 seams are in place{said}")
        assert lines[3:] == ["Only what is noted above is off."]


def test_what_moved_is_named_with_the_version_to_install(
    toy: str, tmp_path: Path, capsys, monkeypatch
):
    file = tmp_path / toy / "pool.py"
    file.write_text(file.read_text().replace("def touch(self, blocks)", "def touch(self, all)"))
    code, lines, _ = ask(capsys, monkeypatch, "--engine-source", tmp_path, "--seams")
    assert code == 1
    assert lines[1].endswith(f"moved (takes self, all): {toy}.pool.Pool.touch")
    assert f"  {toy} {toy}.pool.Pool.touch: moved (takes self, all)" in lines
    assert lines[-1] == f"It would not work: 1 above. A tested version: pip install '{toy}==1.1'"


def test_bad_input_is_one_line(toy: str, tmp_path: Path, capsys, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    text = tmp_path / "text.whl"
    text.write_text("no wheel")
    other = wheel_of(empty.parent, "empty", "1", tmp_path / "other.whl")
    cut = tmp_path / "cut.whl"
    whole = wheel_of(tmp_path, toy, "1.0", tmp_path / "whole.whl").read_bytes()
    cut.write_bytes(b"\0" * 1_000 + whole[1_000:])
    for place, said in (
        (tmp_path / "no", f"there is no folder and no wheel {tmp_path / 'no'}"),
        (text, f"{text} is no wheel and no folder"),
        (empty, f"there is no Toy in {empty}"),
        (other, f"there is no Toy in {other}"),
        (cut, f"{cut} cannot be read ("),
    ):
        code, lines, errors = ask(capsys, monkeypatch, "--engine-source", place)
        assert (code, lines) == (2, [])
        assert errors.startswith(f"statecache: --engine-source: {said}")
        assert errors.count("\n") == 1
    odd = tmp_path / "a\nb\x1b[2J"
    for made in (False, True):
        if made:
            odd.mkdir()
        code, lines, errors = ask(capsys, monkeypatch, "--engine-source", odd)
        assert (code, lines, errors.count("\n")) == (2, [], 1)
        assert "\x1b" not in errors
        assert r"a\nb" in errors
    both = ("--engine-source", tmp_path, "--url", "http://localhost:3")
    code, _, errors = ask(capsys, monkeypatch, *both)
    assert (code, errors) == (2, "statecache: --engine-source and --url: give one of them\n")


def damaged(folder: Path, whole: bytes, at: int, put: bytes) -> Path:
    wheel = folder / "damaged.whl"
    wheel.write_bytes(whole[:at] + put + whole[at + len(put) :])
    return wheel


def test_a_wheel_that_is_damaged_anywhere_is_one_line_or_a_verdict(
    toy: str, tmp_path: Path, capsys, monkeypatch
):
    """Every eighth of its bytes, in turn, is another one."""
    for kind in (zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2):
        with zipfile.ZipFile(tmp_path / "t.whl", "w", kind) as file:
            file.write(tmp_path / toy / "pool.py", f"{toy}/pool.py")
            file.writestr(f"{toy}/__init__.py", "")
            file.writestr(f"{toy}-1.0.dist-info/METADATA", f"Name: {toy}\nVersion: 1.0\n")
        whole = (tmp_path / "t.whl").read_bytes()
        for at in range(0, len(whole), 8):
            wheel = damaged(tmp_path, whole, at, bytes([whole[at] ^ 0x95]))
            code, lines, errors = ask(capsys, monkeypatch, "--engine-source", wheel)
            assert code in (0, 1, 2)
            assert (errors.count("\n"), bool(lines)) == ((1, False) if code == 2 else (0, True))


def test_metadata_that_names_nothing_beside_a_package_is_passed_over(
    toy: str, tmp_path: Path, capsys, monkeypatch
):
    """As an interrupted uninstallation leaves it."""
    for name, text in (("gone", None), (toy, "Name: " + toy), ("other", "Version: 3")):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        if text is not None:
            (info / "METADATA").write_text(text)
    code, lines, errors = ask(capsys, monkeypatch, "--engine-source", tmp_path)
    assert (code, errors) == (0, "")
    assert "Toy unknown: 1 of 2 seams are in place" in lines[2]


def test_source_that_the_parser_gives_up_on_is_missing(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/__init__.py").write_text("")
    for text in (
        "x = " + "-" * 200_000 + "1",
        "x = " + "(" * 5_000,
        "x\0y",
        "x = 1" + "+1" * 99_999,
    ):
        (tmp_path / "deep/er.py").write_text(text)
        ((_, state),) = probe_source(SourceTree(tmp_path), [Seam("deep.er", "A.b")])
        assert state.startswith("missing"), text[:20]
