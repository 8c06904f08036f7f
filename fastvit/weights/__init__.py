"""Weights of other libraries. `fastvit.checkpoints` exports the public functions."""
