"""Templates, theme, figures and number formats shared by all HTML pages."""
