"""Where the loop's batches come from: one buffer, filled in step with training or beside it. See docs/asynchrony.md."""
