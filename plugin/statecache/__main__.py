"""The way into the command: `statecache` or `python -m statecache`."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command; an interrupt while it loads is exit code 130 too, without a traceback."""
    try:
        try:
            from statecache.cli.main import main as run
        except ImportError as error:
            if error.name != "statecache._index":
                raise
            return _without_index(str(error))
        return run()
    except KeyboardInterrupt:
        return 130


def _without_index(problem: str) -> int:
    """Run what works on a broken installation: the doctor."""
    if sys.argv[1:2] != ["doctor"]:
        sys.stderr.write(f"statecache: {problem} (statecache doctor says more)\n")
        return 1
    from statecache.cli.doctor import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
