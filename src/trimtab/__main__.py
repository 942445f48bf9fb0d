"""`python -m trimtab` is the `trimtab` command."""

from trimtab.cli.main import main

if __name__ == "__main__":
    main()
