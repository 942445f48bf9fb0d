"""The `trimtab` command. Modules here parse arguments first and import heavy packages only when a command runs."""
