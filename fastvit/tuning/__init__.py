"""Launch choices and compiled kernels of a model, made before its first step: the commands `tune` and `warmup`."""
