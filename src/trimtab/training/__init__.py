"""The training loop and what it stands on: packing, updates, checkpoints, run files."""
