"""Runs whose processes are actors of a Ray cluster. Ray is optional and imported inside functions."""
