"""The nn.Modules. `fastvit.layers` exports the public ones."""
