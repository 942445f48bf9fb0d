"""Reads token log-probs of any known layout: `open_log` gives a stream of token tables and counts of what was read.

  log_source  finds files, selects the reader of each, reads all and summarizes them
  row_files   JSON, CSV, packed rows;  arrow_files  parquet, arrow;  torch_file  torch.save
  layouts     roles of columns, and which framework's layout a file has
  columns     assigns columns to roles
  batches     rows by role, from lists in many notations
  normalize   makes a `TokenTable` of rows; cuts their lists to the response
  counts      counts of what was read and left out
  run_files   what lies beside the files of a run: recipe, versions of packages

To add a framework, add a row to layouts.toml and its name to the help of `--framework`. To add a format, write a class
with `path`, `names` and `batches` like `ArrowFile`. Then add a branch to `log_source.open_table`, the suffix to
`_READABLE`, and the name to the messages there.
"""

from trimtab.diagnosis.reading.log_source import open_log

__all__ = ["open_log"]
