"""How a setting that cannot be used ends a process of an engine."""

import subprocess
import sys

import pytest

from statecache.errors import SettingsError, Stopped, exit_engine


def test_it_ends_with_status_2_and_one_line_even_where_another_error_is_handled() -> None:
    code = (
        "from statecache.errors import SettingsError, exit_engine\n"
        "try:\n    raise SettingsError('--statecache-cost cannot be 1')\n"
        "except SettingsError as error:\n    exit_engine(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "statecache: --statecache-cost cannot be 1\n"


def test_who_catches_it_has_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Stopped, match=r"^statecache: no memory$") as stopped:
        exit_engine(SettingsError("no memory"))
    assert (stopped.value.code, capsys.readouterr().err) == (2, "statecache: no memory\n")
