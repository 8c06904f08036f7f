"""What needs a GPU: the first minutes, every step of a full run, tuning of the launch tables, the sanitizer."""
