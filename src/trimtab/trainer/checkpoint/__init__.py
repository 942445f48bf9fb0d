"""Checkpoints: what is saved, how it is written, verified and restored."""
