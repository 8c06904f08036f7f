"""Run everything that needs a GPU, from a list of commands: checks, rows, tuning of launch tables, the sanitizer."""
