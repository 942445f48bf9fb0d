"""Models: loading, memory-bounded log-probs and entropy, and the laboratory model."""
