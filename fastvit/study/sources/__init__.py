"""The models that a study can take."""
