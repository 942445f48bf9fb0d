"""Renders the answer of a diagnosis: text (terminal and Markdown), as_json, html_page with its charts, panels."""
