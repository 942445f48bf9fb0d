"""Says whether a loss function is a named objective, by probes made for one property each."""
