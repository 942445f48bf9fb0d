"""The training loop, packing, updates, checkpoints and run files."""
