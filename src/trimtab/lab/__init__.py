"""The laboratory: the same recipe under several objectives and seeds."""
