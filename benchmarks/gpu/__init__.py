"""Run everything that needs a GPU: the first minutes, the other steps, tuning of the launch tables, the sanitizer."""
