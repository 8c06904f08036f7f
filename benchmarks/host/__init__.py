"""The host's time to queue calls: `python -m benchmarks.host`."""
