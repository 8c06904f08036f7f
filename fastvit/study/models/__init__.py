"""Counts what every known model costs."""
