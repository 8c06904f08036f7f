"""The nn.Modules. `fastvit.layers` and `fastvit.eva_layers` export the public ones."""
