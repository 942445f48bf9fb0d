"""Models: loading, log-probs and entropy in bounded memory, perturbation, routing, and the laboratory model."""
