"""Diagnoses log-probs of any trainer: the size of a mismatch, where it lies, its causes, and what to do.

  pipeline    `diagnose`: reading, measuring, causes, advice, in this order; start here
  records     what the stages hand on, and tokens the table of tokens
  reading/    files of any framework and format -> tables of tokens
  measure/    tables of tokens -> size, views, sample
  causes/     measurements -> causes with evidence
  advice/     measurements and causes -> what each preset would do, and the recommended one
  answer      the result and its sentences;  figures  its numbers as text
  hotspots    where the mismatch is;  known_faults  faults of engines and trainers that were reported in public
  output/     the answer as text, JSON and an HTML page
  against     two diagnoses compared;  redaction  for `--redact`

Tables: layouts.toml (frameworks), findings.toml (odd data), causes.toml, candidates.toml, known_faults.toml, rules.toml
(advice), and texts.toml (figures and charts).
"""
