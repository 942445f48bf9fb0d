"""The run directory: file names, writing, reading, and the catalog of metrics.

`directory` is its one writer, `layout` names its files, `trajectories` and `provenance` are two of them; `reader` reads
them for pages and commands, and `summary` has a run in a few numbers and the table of an experiment. `metric_catalog`
explains and judges each metric; `tokenizers` has the texts of token ids; `atomic` writes files that are complete or
absent.
"""
