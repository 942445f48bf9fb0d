"""A run: the training loop, batches, updates, ranks and checkpoints."""
