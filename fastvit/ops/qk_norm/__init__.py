"""Norms of q and k."""
