"""The fused ops against float64 and eager PyTorch."""
