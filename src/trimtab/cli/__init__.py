"""The `trimtab` command. Heavy packages are imported only when a command runs."""
