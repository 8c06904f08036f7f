"""XXX"""

from fastvit.integrations.transformers.layers import register_attention

__all__ = ["register_attention"]
