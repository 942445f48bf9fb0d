"""The run directory: file names, writing, reading, and the catalog of metrics."""
