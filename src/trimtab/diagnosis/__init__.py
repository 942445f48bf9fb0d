"""Diagnoses log-probs of any trainer: the size and location of a mismatch, its causes, and what to do.

  pipeline      `diagnose`, which runs the stages reading, measure, causes and advice; start here
  records       dataclasses that pass between the stages
  tokens        the table of tokens
  reading/      files of any framework and format -> tables of tokens
  measure/      tables of tokens -> size, views, sample
  causes/       measurements -> causes with evidence
  advice/       measurements and causes -> the effect of each preset, and the recommended preset
  answer        the result, its figures and its sentences
  known_faults  faults of engines and trainers that were reported in public
  output/       the answer as text, JSON and an HTML page
  against       comparison of two diagnoses
  redaction     removes identifying data (`--redact`)

Tables: layouts.toml (frameworks), findings.toml (anomalies of the data), causes.toml, candidates.toml,
known_faults.toml, rules.toml (advice), and texts.toml (figures and charts).
"""
