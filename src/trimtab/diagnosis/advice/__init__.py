"""Recommends a preset: what each would do to the data (preset_outcomes), and which one is chosen (rules)."""
