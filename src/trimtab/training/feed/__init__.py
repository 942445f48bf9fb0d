"""Sources of batches: a buffer filled synchronously or beside training. See docs/asynchrony.md."""
