"""Benchmarks: each command writes one JSON record per run."""
