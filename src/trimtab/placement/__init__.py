"""A run whose processes are actors of a Ray cluster. Ray itself is optional and imported inside functions."""
