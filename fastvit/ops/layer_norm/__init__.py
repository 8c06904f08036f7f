"""LayerNorm and RMSNorm."""
