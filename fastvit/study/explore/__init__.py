"""The page of `fastvit explore`."""
