"""Measures launch choices and compiles kernels before a model's first step, for `fastvit tune` and `warmup`."""
