"""What a benchmark is made of: workloads, providers, clock, memory, records, tables and the picture."""
