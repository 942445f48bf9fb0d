"""What all HTML pages share: their parts and the template (`page`), and figures (`charts`)."""
