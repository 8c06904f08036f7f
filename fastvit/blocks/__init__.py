"""Transformer blocks: their description, the functions that run it, and readers that make it from modules."""
