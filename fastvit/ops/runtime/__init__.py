"""Everything the ops share: registration, the choice of a path, autograd, launches."""
