"""Models of Hugging Face transformers, version 5, and `register_attention` for those that are not known by class."""

from fastvit.integrations.transformers.layers import register_attention

__all__ = ["register_attention"]
