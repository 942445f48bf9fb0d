"""Exports of objectives to other frameworks."""
