"""Fused Triton kernels for Vision Transformers, as torch ops and nn.Modules."""
