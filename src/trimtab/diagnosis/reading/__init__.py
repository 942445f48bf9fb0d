"""Reads token log-probs of any known layout: `open_log` gives a stream of token tables and counts of what was read.

../layouts.toml  the columns of each framework's files: another framework is one more row
formats          finds files and selects the reader of each: another format is one more branch of `open_table`
row_files        JSON, CSV and open-instruct's packed rows;  arrow_files  parquet, arrow;  torch_file  torch.save
layouts          roles of columns, and which layout files have
log_source       assigns columns to roles, reads all files, and summarizes them
batches          cells, rows by role, counts of rows left out
normalize        makes a `TokenTable` of rows: aligned lists without padding and prompt
run_files        what lies beside the files of a run: recipe, versions, tokenizer
"""

from trimtab.diagnosis.reading.log_source import LogSource, open_log

__all__ = ["LogSource", "open_log"]
