"""Runs the `trimtab` command as `python -m trimtab`."""

from __future__ import annotations

import sys

from trimtab.cli import starting
from trimtab.errors import TrimtabError, require_extra


def main() -> None:
    """Run the command line; entry point of the console script."""
    starting.guard()
    try:
        require_extra("diagnose", "the command line")
    except TrimtabError as error:
        sys.exit(_refused(error))
    from trimtab.cli.main import main as run

    run()


def _refused(error: TrimtabError) -> int:
    """Prints the error as every command does; returns the exit code of a user error."""
    print(f"trimtab: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
