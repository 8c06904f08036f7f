"""Benchmarks, ahead-of-time compilation and the kernel report; not part of the installed package."""
