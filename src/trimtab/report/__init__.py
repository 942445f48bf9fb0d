"""Pages about runs, from their files.

`run_report` is the page of one run: `health` is its verdict, `run_charts` its charts, `episode_section` its multi-turn
responses. `comparison` is the page of several runs: `groups` says which belong together, `summary_columns` is its
table, `comparison_figures` its figures, `cautions` what limits it. `experiment_page` is that of a grid of methods and
regimes. `run_objective` is the objective of a run.
"""
