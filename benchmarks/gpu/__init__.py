"""What needs a GPU: every step of a full run, tuning of the launch tables, the sanitizer."""
