"""Pages about Trimtab's own runs: one run, several, or an experiment."""
