"""Parts of `benchmarks/diagnosis_zoo.py`: streams of log-probs, faults planted in them, and how answers are scored."""
