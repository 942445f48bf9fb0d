"""Runs the `trimtab` command as `python -m trimtab`."""

from __future__ import annotations

from trimtab.cli import starting


def main() -> None:
    """Run the command line; entry point of the console script."""
    starting.guard()
    from trimtab.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
