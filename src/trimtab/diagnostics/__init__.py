"""Diagnosis of log-probs, reports of runs, and comparisons, all from files."""
