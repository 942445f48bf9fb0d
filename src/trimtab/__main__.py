"""Runs the `trimtab` command as `python -m trimtab`."""

from __future__ import annotations

import os
import sys

from trimtab.cli import starting
from trimtab.cli.starting import COMMANDS
from trimtab.errors import TrimtabError
from trimtab.plugins import require_extra


def main() -> None:
    """Run the command line; entry point of the console script."""
    starting.guard()
    # Set before torch is imported, and inherited by worker processes: waiting libgomp threads sleep soon. By default
    # each keeps a core busy for milliseconds; beside one other busy process, everything takes several times as long.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        _require_packages(sys.argv[1] if len(sys.argv) > 1 else "")
    except TrimtabError as error:
        print(f"trimtab: {error}", file=sys.stderr)  # as every command does
        sys.exit(2)
    from trimtab.cli.main import main as run

    run()


def _require_packages(command: str) -> None:
    """Raises `TrimtabError` naming the extra of `command` if packages that every command needs are missing."""
    try:
        require_extra("diagnose", "the command line")
    except TrimtabError:
        if command not in COMMANDS:
            raise
        require_extra(COMMANDS[command].extra, f"trimtab {command}")


if __name__ == "__main__":
    main()
