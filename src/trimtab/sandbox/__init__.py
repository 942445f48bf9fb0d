"""Runs functions that are not ours in processes with limits on time and memory."""
