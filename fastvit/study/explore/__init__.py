"""Makes the page of `fastvit explore`."""
