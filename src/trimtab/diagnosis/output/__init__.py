"""Renders the answer of a diagnosis: text (terminal, Markdown), as_json, html_page with its panels, and compared."""
