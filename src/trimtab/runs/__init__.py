"""The run directory: file names, writing, reading, and the catalog of metrics.

directory         the only writer of a run directory
layout            the names of its files
trajectories      reads and writes its trajectory files
provenance        reads and writes provenance.json
reader            reads a run for pages and commands
summary           a run in a few numbers, and the table of an experiment
metric_catalog    explains and judges each metric
tokenizers        the texts of token ids
atomic            writes files that are either complete or absent
"""
