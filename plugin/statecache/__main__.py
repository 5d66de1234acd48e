"""The way into the command: `statecache` or `python -m statecache`."""

import sys

__all__ = ["main"]


def main() -> int:
    """Run the command; an interrupt while it loads is exit code 130 too, without a traceback."""
    try:
        from statecache.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
