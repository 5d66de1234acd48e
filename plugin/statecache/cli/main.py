"""The `statecache` command."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from statecache import __version__
from statecache.cli.ab import ab_command
from statecache.cli.doctor import doctor_command
from statecache.cli.fit import fit_command
from statecache.cli.generate import generate
from statecache.cli.plan import plan_command
from statecache.cli.replay import replay_command
from statecache.cli.trace import trace
from statecache.errors import SettingsError, escape_control_chars

__all__ = ["app", "main"]

app = typer.Typer(
    name="statecache",
    help="Prefix caching for hybrid LLMs: which recurrent state to drop, and how many fit.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(generate, name="generate")
app.add_typer(trace, name="trace")
app.command("replay")(replay_command)
app.command("ab")(ab_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.command("fit")(fit_command)

# typer brings its own click or uses the installed one, by version: ask it which.
_ClickException: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


def main() -> int:
    """Run the command; bad input is one line on stderr and exit code 2, an interrupt 130.

    SIGTERM and SIGHUP end it as cleanly, with 128 and their number.
    """
    _open_closed_streams()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup, for one, has it ignored
            signal.signal(number, _leave)
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SettingsError as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except OSError as error:
        _discard_stdout()
        return 1 if isinstance(error, BrokenPipeError) else _fail(f"output: {error.strerror}", 1)
    except _ClickException as error:
        return _fail(f"{error.format_message()} (statecache --help shows the usage)")
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = 2) -> int:
    sys.stderr.write(f"statecache: {escape_control_chars(' '.join(message.split()))}\n")
    return code


def _open_closed_streams() -> None:
    """Give standard streams that are closed the null device, so that no file gets their number."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115


def _leave(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not stop the cleaning up
    sys.exit(128 + number)


def _discard_stdout() -> None:
    """Let the interpreter's last flush succeed although nobody reads."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"statecache {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    del version
