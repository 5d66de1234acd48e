"""tests/engines/install.sh makes a folder anew only where it is a virtual environment."""

import subprocess
from pathlib import Path

import pytest

INSTALL = Path(__file__).parents[1] / "engines/install.sh"


@pytest.mark.parametrize("there", ["folder", "file", "device"])
def test_what_is_no_environment_is_left_alone(tmp_path, there):
    place = Path("/dev/null") if there == "device" else tmp_path / "mine"
    if there == "folder":
        place.mkdir()
        (place / "kept").write_text("mine")
    if there == "file":
        place.write_text("mine")
    done = subprocess.run([INSTALL, place], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"install.sh: {place} is there and is no virtual environment"
    )
    assert (
        place.is_char_device()
        or "mine" in ((place / "kept") if place.is_dir() else place).read_text()
    )
