"""Run everything that needs a GPU, from a list of commands: checks, rows, the sanitizer."""
