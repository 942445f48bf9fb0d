"""Renders a diagnosis as text, JSON and an HTML page."""
