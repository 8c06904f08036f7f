"""Examine kernels without running them on a GPU: machine code of real targets, and bytes moved."""
