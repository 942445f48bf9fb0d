"""Diagnoses log-probs of any trainer: the size of a mismatch, where it lies, its causes, and what to do."""
