"""Pages and pictures made of result files."""
