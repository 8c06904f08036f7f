"""The cost of every known model."""
