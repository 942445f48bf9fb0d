"""Finds the first operation whose bits differ between sampler and trainer."""
