"""Recommends a preset: the effect of each preset on the data (preset_outcomes), and the choice (rules)."""
