"""One script a feature, against named peers in one run; `python -m benchmarks` runs them all."""
