"""The classes of each library that `accelerate` knows."""
