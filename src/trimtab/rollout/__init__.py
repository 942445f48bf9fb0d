"""Rollouts: engines that sample responses and say with which probability."""
