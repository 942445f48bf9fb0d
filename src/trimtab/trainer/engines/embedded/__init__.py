"""Batched sampling with the trainer's own model, in this process."""
