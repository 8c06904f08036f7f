"""Softmax attention."""
