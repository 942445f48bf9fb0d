"""What all HTML pages share: their parts and the template (`page`), figures (`charts`), formats of `numbers`."""
