"""The ops that are part of a transformer block."""
