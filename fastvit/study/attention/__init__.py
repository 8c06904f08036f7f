"""Attention maps and rollout."""
