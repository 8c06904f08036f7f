"""What a ViT costs and what it looks at: plain functions that return dataclasses. The command
`fastvit` is over them."""
