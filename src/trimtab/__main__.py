"""`python -m trimtab` is the `trimtab` command."""

from __future__ import annotations

from trimtab.cli import starting


def main() -> None:
    """The console script."""
    starting.guard()
    from trimtab.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
