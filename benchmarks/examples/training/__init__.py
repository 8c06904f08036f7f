"""Training of an image classifier: what `benchmarks/examples/train.py` is made of."""
