"""The parts of a benchmark: workloads, providers, timing, records and tables."""
