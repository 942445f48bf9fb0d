"""Writes HTML pages about runs from the files of the runs.

`run_report` writes the page of one run, with the verdict of `health` and the charts of `run_charts`. `comparison`
writes the page of several runs, with the groups of `groups`. `step_curves` draws the curves of both. `experiment_page`
writes the page of a grid of methods and regimes. `run_objective` returns the objective of a run.
"""
