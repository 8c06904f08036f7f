"""Patch embedding."""
