"""Reads token log-probs of any known layout: `open_log` gives a stream of token tables and counts of what was read.

  log_source  finds files, selects the reader of each, reads all and summarizes them
  row_files   JSON, CSV, packed rows;  arrow_files  parquet, arrow;  torch_file  torch.save
  layouts     roles of columns, and which framework's layout a file has
  columns     assigns columns to roles
  batches     rows by role, whose lists may be written in many forms
  normalize   makes a `TokenTable` of rows, with their lists cut to the response
  counts      counts of what was read and left out
  run_files   what lies beside the files of a run: recipe, versions of packages

Another framework is one more row of layouts.toml, and a name in the help of `--framework`. Another format is one more
branch of `log_source.open_table`, its suffix in `_READABLE` and its name in the messages there, and a class with
`path`, `names` and `batches` as `ArrowFile` has.
"""

from trimtab.diagnosis.reading.log_source import open_log

__all__ = ["open_log"]
