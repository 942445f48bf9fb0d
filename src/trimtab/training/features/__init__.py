"""Optional parts of a training step, one file each."""
