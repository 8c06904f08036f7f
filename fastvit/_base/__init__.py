"""Helpers that need neither torch nor triton."""
