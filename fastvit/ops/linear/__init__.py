"""Linear layers with an epilogue, plain and gated."""
