"""Engines that sample responses with their log-probs."""
