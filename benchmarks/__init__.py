"""Benchmarks: speed against a memory copy and against other libraries. Run them as scripts."""
