"""The patterns that become fused ops, one a file."""
