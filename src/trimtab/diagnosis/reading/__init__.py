"""Reads token log-probs of any known layout: `open_log` gives a stream of token tables and counts of what was read.

  file_formats  finds files, and selects the reader of each:
                row_files (JSON, CSV, packed rows), arrow_files (parquet, arrow), torch_file (torch.save)
  layouts       roles of columns, and which framework's layout a file has
  columns       assigns columns to roles
  log_source    reads all files, and summarizes them
  batches       rows by role, whose lists `cells` reads in whatever form they were written
  normalize     makes a `TokenTable` of rows; `align` cuts their lists to the response
  counts        counts of what was read and left out
  run_files     what lies beside the files of a run: recipe, versions of packages

Another framework is one more row of layouts.toml, and a name in the help of `--framework`. Another format is one more
branch of `file_formats.open_table`, its suffix in `_READABLE` and its name in the messages there, and a class with
`path`, `names` and `batches` as `ArrowFile` has.
"""

from trimtab.diagnosis.reading.log_source import open_log

__all__ = ["open_log"]
