"""Objectives for other frameworks."""
