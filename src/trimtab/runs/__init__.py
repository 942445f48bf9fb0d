"""The run directory: names, writing, reading, and what its metrics mean."""
