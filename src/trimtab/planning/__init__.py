"""Predicts time, memory and lag of a run from model sizes, device figures and stated assumptions. No torch."""
