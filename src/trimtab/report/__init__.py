"""Pages about runs, from their files.

`run_report` is the page of one run: `health` is its verdict, `run_charts` its charts. `comparison` is the page of
several runs: `groups` says which belong together and what limits it, `comparison_figures` has its figures.
`experiment_page` is that of a grid of methods and regimes. `run_objective` is the objective of a run.
"""
