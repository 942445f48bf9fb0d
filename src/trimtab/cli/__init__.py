"""The `trimtab` command. Files here parse first and import the rest of the house only when a command runs."""
