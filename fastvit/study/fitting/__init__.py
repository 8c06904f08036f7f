"""Choose what each block of a model recomputes, so that a training step fits into a memory budget."""
