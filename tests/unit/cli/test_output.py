"""Output files: whole or not at all, and what cannot be written is said beforehand."""

import os
import stat
from pathlib import Path

import pytest

from statecache.cli.output import check_output, whole_file
from statecache.errors import SettingsError

LONGEST = "n" * 255


@pytest.mark.parametrize("name", ["out", LONGEST])
def test_a_file_appears_when_it_is_whole(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    check_output("--json", out)
    with whole_file("--json", out) as file:
        file.write(b"new")
        assert not out.exists()
    assert out.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"earlier")
    out.chmod(0o640)
    with out.open("rb") as reader:
        with whole_file("--json", out) as file:
            file.write(b"new")
            file.flush()
            assert out.read_bytes() == b"earlier"
        assert reader.read() == b"earlier"
    assert out.read_bytes() == b"new"
    assert stat.S_IMODE(out.stat().st_mode) == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/out")
    for content in (b"one", b"two"):
        with whole_file("--json", tmp_path / "link") as file:
            file.write(content)
        assert (tmp_path / "folder" / "out").read_bytes() == content
    assert (tmp_path / "link").is_symlink()


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"earlier")

    def write_and_fail() -> None:
        with whole_file("--json", out) as file:
            file.write(b"new")
            raise OSError("disk on fire")

    with pytest.raises(SettingsError, match=r"--json: .*out cannot be written \(disk on fire\)"):
        write_and_fail()
    assert out.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (LONGEST + "n", "cannot be written .File name too long"),
        ("loop", "cannot be written .Too many levels"),
        ("file/x", "there is no directory"),
        ("folder", "is a directory"),
    ],
)
def test_what_cannot_be_written_names_the_flag(name: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(SettingsError, match=f"^--plot: .*{problem}"):
        check_output("--plot", tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_mode_that_forbids_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o444)
    with pytest.raises(SettingsError, match=r"--json: .*Permission denied"):
        check_output("--json", tmp_path / "file")
    tmp_path.chmod(0o555)
    with pytest.raises(SettingsError, match=r"--json: .*Permission denied"):
        check_output("--json", tmp_path / "new")
    tmp_path.chmod(0o755)
