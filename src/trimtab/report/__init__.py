"""HTML reports: one run, a comparison of several runs, or an experiment."""
