"""Sweeps over other libraries' models."""
