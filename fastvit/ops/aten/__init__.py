"""The ops on PyTorch's own functions: CPUs, float64, machines without triton."""
