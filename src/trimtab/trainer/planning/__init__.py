"""Predicts time, memory and lag of a run from model shapes, device peaks and stated assumptions. Needs no torch."""
