"""Code shared by all HTML pages: the parts of a page and their template (`page`), and figures (`charts`)."""
