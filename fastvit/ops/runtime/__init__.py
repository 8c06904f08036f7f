"""Everything the ops share: registration, the choice of a route, autograd, launches."""
