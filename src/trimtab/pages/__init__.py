"""What all HTML pages share: templates, theme and number formats."""
